"""Queues a batch or a run in an order that depends on the whole file.

While the file is read, its messages or lines are kept in a temporary file. Afterwards Redis has the
index of all lines of the batch, and counts the messages that have been pushed in the order. Every
submit of the file computes the same order, so each can continue an interrupted one.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from contract import naming
from contract.errors import BatchConflict, RequestRejected
from contract.openai.lines import parse_line
from contract.redis.batches import BatchStore
from contract.redis.enqueued import Enqueued
from contract.settings import Settings
from producer.batch_watch import (
    Submitted,
    batch_closed,
    different_file,
    wait_while_full,
    writes_lost,
)
from producer.input.reader import CHUNK_BYTES, CHUNK_LINES, ExplainError, RawChunk
from producer.input.seen import SeenIds
from producer.input.tables.kept import split_kept
from producer.submit.lines import PreparedChunk
from producer.submit.order.keys import keys_of, model_of, text_of
from producer.submit.order.prefix import OrderChoice, cache_tokens, choose_order
from producer.submit.order.prefix_keys import PrefixKeys, Spool
from producer.submit.submission import OrderOption

#: Function that gets the number of pushed messages, and the reason of a wait ('' without one).
Report = Callable[[int, str], None]


@dataclass(slots=True)
class PlannedMessages:
    """Keeps the messages of one batch, then queues them in order.

    Call `keep` for each chunk of the file, then `push` once. Both raise WriteFailed or Redis's
    errors. `list_key` is the list in Redis that the messages go to.
    """

    store: BatchStore
    settings: Settings
    submitted: Submitted
    list_key: str
    option: OrderOption
    _spool: Spool = field(default_factory=Spool)
    _records: PrefixKeys = field(default_factory=PrefixKeys)
    #: With routes: the number of each message's queue, and the numbers by name.
    _queues: "array[int]" = field(default_factory=lambda: array("H"))
    _queue_names: dict[str, int] = field(default_factory=dict)

    def keep(self, chunk: PreparedChunk) -> None:
        """Move the messages of a chunk to the temporary file."""
        self._spool.add(chunk.messages)
        bodies = chunk.bodies
        models = (model_of(body) for _, body in bodies)
        self._records.add(*keys_of([text_of(url, body) for url, body in bodies]), models)
        names = self._queue_names
        self._queues.extend(names.setdefault(queue, len(names)) for queue in chunk.queues)
        chunk.announced = len(chunk.messages)
        chunk.messages, chunk.queues, chunk.requests = [], [], []

    def close(self) -> None:
        self._records.close()
        self._spool.close()

    def push(self, end: tuple[int, str], report: Report) -> tuple[OrderChoice, int, int]:
        """Queue the messages that are not queued yet.

        `end` is the cursor (last line number) and digest of the file's last chunk.

        Returns:
            The order, the number of messages that this call has queued, and how many of them after
            the batch had been stopped.

        Raises:
            BatchConflict: the batch is closed, or its messages are queued in another order.
            BatchChanged: the batch was deleted meanwhile; WritesLost if Redis has lost messages.
            StoreUnavailable: the batch stays open.
        """
        batch = self.submitted.batch
        state = self.store.batch(batch.id) or batch
        cache = cache_tokens(self.store, batch.fields.get("queue", ""))
        choice = choose_order(self.option, self._records, cache, state.fields.get("plan", ""))
        position = confirmed = pushed = too_late = 0
        while position < len(self._spool):
            numbers, messages = self._next_messages(choice, position)
            answer = self._send(choice, end, position, messages, self._queues_of(numbers), report)
            if answer.answer == "ok":
                position += len(messages)
                pushed += len(messages)
                too_late += len(messages) * (answer.text == "stopped")
            elif answer.answer == "at" and answer.cursor >= confirmed:
                position = answer.cursor
            elif answer.answer == "plan" and not confirmed:
                earlier = choice.name
                choice = choose_order(self.option, self._records, cache, answer.text)
                if choice.name != answer.text:
                    raise self._other_order(answer.text, earlier)
                continue
            else:
                raise self._refused(answer, end)
            confirmed = position
            report(position, "")
        return choice, pushed, too_late

    def _queues_of(self, numbers: Sequence[int]) -> list[str]:
        """Return the queues of messages by their numbers; none without routes."""
        names = list(self._queue_names)
        return [names[self._queues[number]] for number in numbers] if names else []

    def _next_messages(self, choice: OrderChoice, position: int) -> tuple[list[int], list[bytes]]:
        """Return the numbers in the file of the next messages in order, and these messages.

        The first has this position in the order. One call of the script can take all of them.
        """
        end = min(position + CHUNK_LINES, len(self._spool))
        numbers = range(position, end) if choice.order is None else choice.order[position:end]
        taken: list[int] = []
        messages: list[bytes] = []
        size = 0
        for number in map(int, numbers):
            taken.append(number)
            messages.append(self._spool.read(number))
            size += len(messages[-1])
            if size >= CHUNK_BYTES:
                break
        return taken, messages

    def _send(
        self, choice: OrderChoice, end: tuple[int, str], position: int, messages: list[bytes],
        queues: list[str], report: Report,
    ) -> Enqueued:  # fmt: skip
        def enqueue() -> Enqueued:
            return self.store.enqueue_planned(
                self.submitted.batch,
                self.list_key,
                end,
                choice.name,
                position,
                messages,
                high_water=self.settings.high_water,
                high_water_requests=self.settings.high_water_requests,
                queues=queues,
            )

        return wait_while_full(
            lambda: self.submitted.send(enqueue), lambda text: report(position, text)
        )

    def _refused(self, answer: Enqueued, end: tuple[int, str]) -> Exception:
        batch_id = self.submitted.batch.id
        if answer.answer == "gone":
            return self.submitted.gone()
        if answer.answer == "sealed":
            return batch_closed(batch_id, "all its requests were queued")
        if answer.answer == "moved" and answer.cursor > end[0]:
            return different_file(batch_id, f"this one ends at line {end[0]}")
        return writes_lost(batch_id, answer)

    def _other_order(self, theirs: str, ours: str) -> BatchConflict:
        batch_id = self.submitted.batch.id
        return BatchConflict(
            f"batch {batch_id} is being queued in an order ({theirs}) that this version of "
            f"warmq does not plan for the same file (it plans {ours}); go on with the "
            "version that began it",
            remedy="new_batch_id",
        )


class PlannedLines:
    """Keeps all lines of a run's file, then yields them in order.

    `seed` (hex) is the digest before the first chunk. Each line keeps its number, so that requests
    and results do not depend on the order; a chunk's cursor counts lines in the new order.
    """

    def __init__(self, raws: Iterator[RawChunk], seed: str, overrides: dict[str, Any]) -> None:
        self._seed, self._overrides = seed, overrides
        self._explain: ExplainError | None = None
        self._spool, self._records = Spool(), PrefixKeys()
        self._numbers, self._too_long = array("Q"), dict[int, int]()
        #: Positions of lines with a repeated custom_id. These lines come last, so that the first
        #: line with that custom_id in the file runs, and not another one.
        self._repeated: dict[int, None] = {}
        with closing(SeenIds()) as seen:
            for raw in raws:
                self._keep(raw, seen)

    def __len__(self) -> int:
        return len(self._numbers)

    def close(self) -> None:
        self._records.close()
        self._spool.close()

    def _keep(self, raw: RawChunk, seen: SeenIds) -> None:
        texts, models = [], []
        for position, (_, line) in enumerate(raw.lines, len(self)):
            text, model = list[bytes](), ""  # a bad line has neither
            try:
                request = parse_line(split_kept(line)[0], self._overrides)
                custom_id, model = request.custom_id, model_of(request.body)
                text = text_of(request.url, request.body)
            except RequestRejected as error:
                custom_id = error.custom_id
            texts.append(text)
            models.append(model)
            if custom_id is not None and not seen.add(naming.request_id("", custom_id)):
                self._repeated[position] = None
        self._too_long |= raw.too_long
        self._explain = raw.explain
        self._spool.add(line for _, line in raw.lines)
        self._numbers.extend(number for number, _ in raw.lines)
        self._records.add(*keys_of(texts), models)

    def choose(self, option: OrderOption, cache: int, earlier: str) -> OrderChoice:
        """Choose the order of the lines, as choose_order does."""
        return choose_order(option, self._records, cache, earlier)

    def chunks(self, choice: OrderChoice) -> Iterator[RawChunk]:
        """Yield the lines in the chosen order, in chunks."""
        order = self._positions(choice)
        left = len(self)
        running = hashlib.sha256(bytes.fromhex(self._seed) + choice.name.encode())
        ordinal = 0
        while left:
            raw = RawChunk(ordinal, len(self) - left + 1, explain=self._explain)
            while left and len(raw.lines) < CHUNK_LINES and raw.size < CHUNK_BYTES:
                self._add(raw, next(order), running)
                left -= 1
            raw.cursor, raw.digest = len(self) - left, running.hexdigest()
            yield raw
            ordinal += 1

    def _positions(self, choice: OrderChoice) -> Iterator[int]:
        positions = range(len(self)) if choice.order is None else map(int, choice.order)
        yield from (position for position in positions if position not in self._repeated)
        yield from self._repeated

    def _add(self, raw: RawChunk, position: int, running: "hashlib._Hash") -> None:
        number, line = self._numbers[position], self._spool.read(position)
        if number in self._too_long:
            raw.too_long[number] = self._too_long[number]
        raw.lines.append((number, line))
        raw.size += len(line)
        running.update(b"%d %d " % (number, self._too_long.get(number, len(line))) + line)
