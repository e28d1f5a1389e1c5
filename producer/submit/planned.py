"""Queues a batch in an order that is known only when the whole file was read.

Meanwhile its messages are in a temporary file. Redis has the index of all lines by then, and the
number of messages that are to come. It counts those that have come, in the order of the plan;
every submit of the file makes the same plan, so each can go on where another one stopped.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from contract.batch import Batch
from contract.errors import BatchConflict
from contract.redis.batches import BatchStore, Enqueued
from contract.settings import Settings
from producer.input.reader import CHUNK_BYTES, CHUNK_LINES
from producer.submit import conflicts
from producer.submit.lines import PreparedChunk
from producer.submit.order.choice import Choice, cache_tokens, choose
from producer.submit.order.keys import keys_of, text_of
from producer.submit.order.records import Records
from producer.submit.order.spool import Spool
from producer.submit.submission import Wish

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
    wish: Wish
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

    def push(self, end: tuple[int, str], report: Report) -> tuple[Choice, int]:
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
        choice = choose(self.wish, self._records, cache, state.fields.get("plan", ""))
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
                choice = choose(self.wish, self._records, cache, answer.text)
                if choice.name != answer.text:
                    raise self._other_plan(answer.text, earlier)
                continue
            else:
                raise self._refused(answer, end)
            confirmed = position
            report(position, "")
        return choice, pushed

    def _read(self, choice: Choice, position: int) -> list[bytes]:
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
        choice: Choice,
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
            return conflicts.deleted(batch_id)
        if answer.answer == "sealed":
            return conflicts.closed(batch_id, "all its requests were queued")
        if answer.answer == "moved" and answer.cursor > end[0]:
            return conflicts.differs(batch_id, f"this one ends at line {end[0]}")
        return conflicts.lost(batch_id, answer)

    def _other_plan(self, theirs: str, ours: str) -> BatchConflict:
        return BatchConflict(
            f"batch {self.batch.id} is being queued in an order ({theirs}) that this version of "
            f"warmq does not plan for the same file (it plans {ours}); go on with the version that "
            "began it",
            remedy="new_batch_id",
        )
