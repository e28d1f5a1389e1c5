"""The chunks of a file for a run (producer/run/windows.py) with its lines in a planned order.

The lines lie in a temporary file meanwhile. Each keeps its number in the input, so its request and
its result are what they would be without an order; a chunk's cursor counts lines in the new order.
"""

import hashlib
from array import array
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from contract import naming
from contract.errors import RequestRejected
from contract.openai.lines import parse_line
from producer.input.reader import CHUNK_BYTES, CHUNK_LINES, RawChunk, Told
from producer.input.seen import SeenIds
from producer.submit.order.choice import Choice, choose
from producer.submit.order.keys import keys_of, text_of
from producer.submit.order.records import Records
from producer.submit.order.spool import Spool
from producer.submit.submission import Wish


class PlannedLines:
    """A whole file's lines. `seed` (hex) is the digest that the first chunk follows."""

    def __init__(self, raws: Iterator[RawChunk], seed: str, overrides: dict[str, Any]) -> None:
        self._seed = seed
        self._told: Told | None = None
        self._spool, self._records = Spool(), Records()
        self._numbers, self._too_long = array("Q"), dict[int, int]()
        #: Places of lines whose custom_id an earlier line has. They come last: as in any batch, the
        #: first line of the file with an id is the one that runs.
        self._repeated: dict[int, None] = {}
        with closing(SeenIds()) as seen:
            for raw in raws:
                self._take(raw, overrides, seen)

    def __len__(self) -> int:
        return len(self._numbers)

    def close(self) -> None:
        """Give memory and disk back."""
        self._records.close()
        self._spool.close()

    def _take(self, raw: RawChunk, overrides: dict[str, Any], seen: SeenIds) -> None:
        texts = []
        for place, (_, line) in enumerate(raw.lines, len(self)):
            custom_id, text = _read(line, overrides)
            texts.append(text)
            if custom_id is not None and not seen.add(naming.request_id("", custom_id)):
                self._repeated[place] = None
        self._too_long |= raw.too_long
        self._told = raw.told
        self._spool.add(line for _, line in raw.lines)
        self._numbers.extend(number for number, _ in raw.lines)
        self._records.add(*keys_of(texts))

    def choose(self, wish: Wish, cache: int, earlier: str) -> Choice:
        """Decide on an order, as `choice.choose` does."""
        return choose(wish, self._records, cache, earlier)

    def chunks(self, choice: Choice) -> Iterator[RawChunk]:
        """Yield the chunks in the order of the choice."""
        order = self._places(choice)
        left = len(self)
        running = hashlib.sha256(bytes.fromhex(self._seed) + choice.name.encode())
        ordinal = 0
        while left:
            raw = RawChunk(ordinal, len(self) - left + 1, told=self._told)
            while left and len(raw.lines) < CHUNK_LINES and raw.size < CHUNK_BYTES:
                self._add(raw, next(order), running)
                left -= 1
            raw.cursor, raw.digest = len(self) - left, running.hexdigest()
            yield raw
            ordinal += 1

    def _places(self, choice: Choice) -> Iterator[int]:
        wanted = range(len(self)) if choice.order is None else map(int, choice.order)
        yield from (place for place in wanted if place not in self._repeated)
        yield from self._repeated

    def _add(self, raw: RawChunk, at: int, running: "hashlib._Hash") -> None:
        number, line = self._numbers[at], self._spool.read(at)
        if number in self._too_long:
            raw.too_long[number] = self._too_long[number]
        raw.lines.append((number, line))
        raw.size += len(line)
        running.update(b"%d %d " % (number, self._too_long.get(number, len(line))) + line)


def _read(line: bytes, overrides: dict[str, Any]) -> tuple[str | None, list[bytes]]:
    """Return a line's custom_id and what the engine will see of it: nothing of a bad line."""
    try:
        request = parse_line(line, overrides)
    except RequestRejected as error:
        return error.custom_id, []
    return request.custom_id, text_of(request.url, request.body)
