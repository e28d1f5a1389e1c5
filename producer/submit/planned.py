"""Queues a batch, or a run's lines, in an order that is known only when the whole file was read.

Meanwhile a batch's messages, or a run's lines, are in a temporary file. Of a batch Redis has the
index of all lines by then, and the number of messages that are to come. It counts those that have
come, in the order of the plan; every submit of the file makes the same plan, so each can go on
where another one stopped.
"""

import hashlib
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from contract import naming
from contract.batch import Batch
from contract.errors import BatchConflict, RequestRejected
from contract.openai.lines import parse_line
from contract.redis.batches import BatchStore, Enqueued
from contract.settings import Settings
from producer.batch_watch import closed, deleted, differs, lost
from producer.input.reader import CHUNK_BYTES, CHUNK_LINES, ExplainError, RawChunk
from producer.input.seen import SeenIds
from producer.submit.lines import PreparedChunk
from producer.submit.order.keys import keys_of, text_of
from producer.submit.order.prefix import OrderChoice, cache_tokens, choose_order
from producer.submit.order.records import Records, Spool
from producer.submit.submission import OrderOption

#: Waits between looks at a Redis that is full, in seconds.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
#: Called with how many messages are queued, and what is waited for ('' if nothing).
Report = Callable[[int, str], None]


@dataclass(slots=True)
class PlannedMessages:
    """The messages of one batch whose order is planned.

    `keep` is called for each chunk of the file, then `push` once. `list_key` is where they go.
    """

    store: BatchStore
    settings: Settings
    batch: Batch
    list_key: str
    wish: OrderOption
    _spool: Spool = field(default_factory=Spool)
    _records: Records = field(default_factory=Records)

    def keep(self, chunk: PreparedChunk) -> None:
        """Take the messages out of a chunk.

        Raises:
            WriteFailed: there is no room for them on disk.
        """
        self._spool.add(chunk.messages)
        self._records.add(*keys_of([text_of(url, body) for url, body in chunk.bodies]))
        chunk.announced = len(chunk.messages)
        chunk.messages, chunk.bodies = [], []

    def close(self) -> None:
        """Give memory and disk back."""
        self._records.close()
        self._spool.close()

    def push(self, end: tuple[int, str], report: Report) -> tuple[OrderChoice, int]:
        """Queue what is not queued yet; `end` is the cursor and digest of the file's last chunk.

        Returns:
            The order, and how many messages were queued now.

        Raises:
            BatchConflict: if the batch is closed, or its messages are queued by another plan.
            BatchChanged: if it was deleted meanwhile; WritesLost if Redis has lost messages.
            StoreUnavailable: if Redis is gone or refuses; the batch stays open.
        """
        state = self.store.batch(self.batch.id) or self.batch
        cache = cache_tokens(self.store, self.batch.fields.get("queue", ""))
        choice = choose_order(self.wish, self._records, cache, state.fields.get("plan", ""))
        position = confirmed = pushed = 0
        while position < len(self._spool):
            messages = self._read(choice, position)
            answer = self._sent(choice, end, position, messages, report)
            if answer.answer == "ok":
                position += len(messages)
                pushed += len(messages)
            elif answer.answer == "at" and answer.cursor >= confirmed:
                position = answer.cursor
            elif answer.answer == "plan" and not confirmed:
                earlier = choice.name
                choice = choose_order(self.wish, self._records, cache, answer.text)
                if choice.name != answer.text:
                    raise self._other_plan(answer.text, earlier)
                continue
            else:
                raise self._refused(answer, end)
            confirmed = position
            report(position, "")
        return choice, pushed

    def _read(self, choice: OrderChoice, position: int) -> list[bytes]:
        """Return the messages from a position of the order on, as many as one script takes."""
        end = min(position + CHUNK_LINES, len(self._spool))
        numbers = range(position, end) if choice.order is None else choice.order[position:end]
        found: list[bytes] = []
        size = 0
        for number in map(int, numbers):
            found.append(self._spool.read(number))
            size += len(found[-1])
            if size >= CHUNK_BYTES:
                break
        return found

    def _sent(
        self,
        choice: OrderChoice,
        end: tuple[int, str],
        position: int,
        messages: list[bytes],
        report: Report,
    ) -> Enqueued:
        """Send messages; while Redis is full, wait and say so."""
        wait_s = _FIRST_WAIT_S
        while True:
            answer = self.store.enqueue_planned(
                self.batch,
                self.list_key,
                end,
                choice.name,
                position,
                messages,
                high_water=self.settings.high_water,
                high_water_requests=self.settings.high_water_requests,
            )
            if answer.answer != "full":
                return answer
            report(position, answer.text)
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    def _refused(self, answer: Enqueued, end: tuple[int, str]) -> Exception:
        batch_id = self.batch.id
        if answer.answer == "gone":
            return deleted(batch_id)
        if answer.answer == "sealed":
            return closed(batch_id, "all its requests were queued")
        if answer.answer == "moved" and answer.cursor > end[0]:
            return differs(batch_id, f"this one ends at line {end[0]}")
        return lost(batch_id, answer)

    def _other_plan(self, theirs: str, ours: str) -> BatchConflict:
        return BatchConflict(
            f"batch {self.batch.id} is being queued in an order ({theirs}) that this version of "
            f"warmq does not plan for the same file (it plans {ours}); go on with the version that "
            "began it",
            remedy="new_batch_id",
        )


class PlannedLines:
    """A whole file's lines for a run. `seed` (hex) is the digest that the first chunk follows.

    Each keeps its number in the input, so its request and its result are what they would be without
    an order; a chunk's cursor counts lines in the new order.
    """

    def __init__(self, raws: Iterator[RawChunk], seed: str, overrides: dict[str, Any]) -> None:
        self._seed = seed
        self._told: ExplainError | None = None
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
        self._told = raw.explain
        self._spool.add(line for _, line in raw.lines)
        self._numbers.extend(number for number, _ in raw.lines)
        self._records.add(*keys_of(texts))

    def choose(self, wish: OrderOption, cache: int, earlier: str) -> OrderChoice:
        """Decide on an order, as `prefix.choose_order` does."""
        return choose_order(wish, self._records, cache, earlier)

    def chunks(self, choice: OrderChoice) -> Iterator[RawChunk]:
        """Yield the chunks in the order of the choice."""
        order = self._places(choice)
        left = len(self)
        running = hashlib.sha256(bytes.fromhex(self._seed) + choice.name.encode())
        ordinal = 0
        while left:
            raw = RawChunk(ordinal, len(self) - left + 1, explain=self._told)
            while left and len(raw.lines) < CHUNK_LINES and raw.size < CHUNK_BYTES:
                self._add(raw, next(order), running)
                left -= 1
            raw.cursor, raw.digest = len(self) - left, running.hexdigest()
            yield raw
            ordinal += 1

    def _places(self, choice: OrderChoice) -> Iterator[int]:
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
