"""Submits a file as one batch, a chunk at a time.

The next chunk is parsed while earlier ones are being sent. Each chunk is sent with the cursor (last
line number) and digest of the chunk before it. So repeated, resumed and concurrent submits of the
same file queue every request once, and another file is refused.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from dataclasses import InitVar, dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from contract.batch import Batch
from contract.errors import BatchConflict
from contract.index import IndexChunk
from contract.openai.lines import Request
from contract.redis.batches import BatchStore
from contract.redis.enqueued import Enqueued
from contract.results import error_of
from contract.settings import Settings
from producer.batch_watch import (
    Submitted,
    batch_closed,
    different_file,
    end_lost,
    wait_while_full,
    writes_lost,
)
from producer.input.reader import CHUNK_BYTES, RawChunk
from producer.input.seen import SeenIds
from producer.submit import batch_trace
from producer.submit.expected import Sample, expected, ignore
from producer.submit.lines import Leaders, LinesToMessages, PreparedChunk
from producer.submit.reuse import Reuse
from producer.submit.routes import Routes
from producer.submit.submission import Submission
from producer.time_left import OutlookReads, Work

if TYPE_CHECKING:  # these load numpy, which takes 0.1 s
    from producer.submit.order.prefix import OrderChoice
    from producer.submit.planned import PlannedMessages

#: Seconds between two checks whether the sender's thread has sent a chunk.
_POLL_S = 0.1
#: Most chunks in flight; with one, Redis would be idle while the next chunk is parsed.
CHUNKS_IN_FLIGHT = 2


@dataclass(slots=True)
class Summary:
    """Counts of one submit.

    `lines` is the number of lines read. `found` requests were in the batch before this submit,
    `queued` were added by it, `without_limit` of the added ones have no max_tokens. `ignored`
    counts the lines with each ignored field. `waiting` is the reason of a wait for a full Redis. If
    the batch is planned, `pushed` messages are in the queue, in the order `choice`. `too_late`
    requests were added after the batch had been stopped, and are cancelled.
    """

    batch: Batch
    lines: int = 0
    found: int = 0
    queued: int = 0
    rejected: int = 0
    without_limit: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    first_error: str = ""
    waiting: str = ""
    pushed: int = 0
    too_late: int = 0
    choice: OrderChoice | None = None


@dataclass
class Submitter:
    """Submits one file as a batch that `submission.create` has returned.

    One thread sends chunks; the caller's thread counts, and calls `report`. `check` may raise
    RequestRejected for a line. With `unique`, the caller has checked that no custom_id is repeated.
    """

    store: BatchStore
    settings: Settings
    submission: Submission
    batch: InitVar[Batch]
    report: Callable[[Summary], None] = lambda summary: None
    check: Callable[[Request], None] | None = None
    unique: bool = field(default=False, kw_only=True)

    def __post_init__(self, batch: Batch) -> None:
        self._id, self._list_key = batch.id, batch.fields["list"]
        self._writer = self.submission.writer(batch, self.submission.queue)
        self._routes = Routes.of(batch, self.submission)
        self._summary, self._sample = Summary(batch), Sample()
        self._submitted = Submitted(self.store, batch)
        self._end = (0, self.submission.start)
        #: Chunks in flight: the future of `_send`'s numbers, and the reasons of waits.
        self._sending: deque[tuple[Future[tuple[int, int, int, int]], SimpleQueue[str]]] = deque()
        self._stop = threading.Event()
        self._planned: PlannedMessages | None = None
        self._reuse = Reuse.of(self.store, self.settings, self.submission)

    def run(self, raw_chunks: Iterator[RawChunk]) -> Summary:
        """Queue the requests that are not queued yet, and seal the batch (mark it as complete).

        If so many requests fail meanwhile that the batch is stopped, all its open requests end,
        also those of the lines that are read after that.

        Raises:
            BatchConflict: a chunk differs from the one that was submitted before.
            BatchChanged: the batch was deleted meanwhile.
            WritesLost: (a BatchChanged) Redis has lost chunks, which must be submitted again.
            InputUnreadable, StoreUnavailable: the batch stays open.
            WriteFailed: the disk cannot hold a planned batch's messages.
        """
        summary = self._summary
        if summary.batch.planned and not summary.batch.sealed:
            from producer.submit.planned import PlannedMessages  # noqa: PLC0415 - loads numpy

            self._planned = PlannedMessages(
                self.store, self.settings, self._submitted, self._list_key, self.submission.order
            )
        try:
            with closing(self._planned) if self._planned else nullcontext():
                self._read(raw_chunks)
                if self._planned:
                    with batch_trace.export_step("plan", summary.batch, self.submission.queue):
                        self._push(self._planned)
            self.report(summary)
            self.seal()
        except BatchConflict:  # an older worker seals a batch that it stops
            state = self.store.batch(self._id)
            if state is None or not state.stopped or state.life != summary.batch.life:
                raise
            summary.batch = state
        if summary.batch.stopped:
            self.store.cancel(summary.batch, summary.batch.fields["reason"])
            summary.batch = self.store.batch(self._id) or summary.batch
        batch_trace.export_submission(
            summary.batch, self.submission.queue, self.submission.parent_traceparent
        )
        return summary

    def _read(self, raw_chunks: Iterator[RawChunk]) -> None:
        """Check all lines, and send the chunks that Redis does not have."""
        summary, window = self._summary, self.submission.window
        stored = self.store.index(self._id) if summary.batch.number("cursor") else iter(())
        own_ids = nullcontext() if self.unique else closing(SeenIds())
        ids = nullcontext(window.seen) if window else own_ids
        dedupe = closing(Leaders()) if self.submission.dedupe else nullcontext()
        with ids as seen, dedupe as leaders, ThreadPoolExecutor(1, "warmq-enqueue") as sender:
            lines = LinesToMessages(
                self._id,
                self._writer,
                self.submission.overrides,
                self.settings.max_line_bytes,
                seen,
                window.name if window else "",
                leaders,
                keep_requests=self._planned is not None,
                check=self._routes.check if self._routes.queues else self.check,
                keep_columns=bool(self.submission.keep),
                sample=ignore if window else self._sample.add,
                routes=self._routes,
            )
            try:
                for raw in raw_chunks:
                    kept = next(stored, None)
                    if kept is not None:
                        self._skip(lines, raw, kept, raw_chunks)
                    else:
                        self._queue(sender, lines, raw)
                    self._end = (raw.cursor, raw.digest)
                    summary.lines = raw.cursor
                    self.report(summary)
                self._settle(0)
            finally:
                self._stop.set()

    def _push(self, planned: PlannedMessages) -> None:
        summary = self._summary

        def report(pushed: int, waiting: str) -> None:
            summary.pushed, summary.waiting = pushed, waiting
            self.report(summary)

        summary.choice, summary.queued, summary.too_late = planned.push(self._end, report)

    def _queue(self, sender: ThreadPoolExecutor, lines: LinesToMessages, raw: RawChunk) -> None:
        """Pass a chunk to the sender, when fewer than CHUNKS_IN_FLIGHT are in flight."""
        prepared = lines.prepare(raw, self._end)
        if self._planned:
            self._planned.keep(prepared)
        self._summary.without_limit += prepared.without_limit
        self._summary.ignored += prepared.ignored
        self._summary.first_error = self._summary.first_error or prepared.first_error
        self._settle(CHUNKS_IN_FLIGHT - 1)
        waits: SimpleQueue[str] = SimpleQueue()
        self._sending.append((sender.submit(self._send, prepared, waits), waits))
        del prepared
        if raw.size > CHUNK_BYTES:
            self._settle(0)  # memory may hold only one chunk with a huge line

    def _settle(self, most: int) -> None:
        """Wait until at most `most` chunks are in flight; count the results of the rest."""
        summary = self._summary
        while len(self._sending) > most:
            future, waits = self._sending[0]
            # Short waits, because a Ctrl-C that comes just before an endless wait has no effect.
            while not wait([future], _POLL_S).done:
                if not waits.empty():
                    summary.waiting = waits.get()
                    self.report(summary)
            self._sending.popleft()
            queued, rejected, found, too_late = future.result()
            summary.queued += queued
            summary.rejected += rejected
            summary.found += found
            summary.too_late += too_late
            summary.waiting = ""

    def _skip(
        self, lines: LinesToMessages, raw: RawChunk, kept: IndexChunk, rest: Iterator[RawChunk]
    ) -> None:
        """Count a chunk that was submitted before; raise BatchConflict if it differs."""
        if (raw.cursor, raw.digest) != (kept.cursor, kept.digest):
            raise different_file(self._id, self._difference(raw, kept.cursor, rest))
        self._summary.found += len(kept.entries)
        if self._planned:
            self._planned.keep(lines.prepare(raw, self._end))
        else:
            lines.take_stored(raw, kept)

    def _difference(self, raw: RawChunk, kept: int, rest: Iterator[RawChunk]) -> str:
        """Return how a file differs in a chunk that the batch has up to the line `kept`."""
        batch = self._summary.batch
        lines = batch.number("cursor")
        if raw.cursor < lines and raw.cursor < kept and next(rest, None) is None:
            return f"this one ends at line {raw.cursor}, the batch has {lines}"
        if raw.cursor > kept == lines and batch.sealed:
            return f"this one has more lines than the batch, which ends at line {lines}"
        return f"it differs within lines {raw.first} to {raw.cursor}"

    def _send(self, chunk: PreparedChunk, waits: SimpleQueue[str]) -> tuple[int, int, int, int]:
        """Enqueue one chunk, in the sender's thread.

        Returns the numbers of requests queued, rejected, found, and too late.
        """

        def enqueue() -> Enqueued:
            messages, queues, known = chunk.parts()
            return self.store.enqueue(
                self._summary.batch,
                self._list_key,
                chunk.before,
                chunk.index,
                messages,
                chunk.rejects,
                high_water=self.settings.high_water,
                high_water_requests=self.settings.high_water_requests,
                announced=chunk.announced,
                columns=chunk.columns,
                queues=queues,
                known=known,
            )

        def send() -> Enqueued:
            return wait_while_full(lambda: self._submitted.send(enqueue), waits.put, self._stop)

        answer = send() if self._reuse is None else self._reuse.send(chunk, send)
        if answer.answer == "full":
            return 0, 0, 0, 0
        if answer.answer == "ok":
            count = len(chunk.messages) + chunk.identical
            too_late = 0 if self._planned or answer.text != "stopped" else count
            return count, len(chunk.rejects), 0, too_late
        return 0, 0, self._stored_before(answer, chunk), 0

    def _stored_before(self, answer: Enqueued, chunk: PreparedChunk) -> int:
        """Return the number of a chunk's requests that are stored already.

        Another submit has stored them, or a script whose reply was lost.
        """
        if answer.answer == "gone":
            raise self._submitted.gone()
        kept = next(self.store.index(self._id, chunk.ordinal), None)
        if kept is None and answer.answer == "moved" and answer.cursor < chunk.before[0]:
            raise writes_lost(self._id, answer)
        if kept is None:
            raise batch_closed(self._id, f"line {chunk.first}")
        if (kept.cursor, kept.digest) != (chunk.index.cursor, chunk.index.digest):
            raise different_file(
                self._id, f"it differs within lines {chunk.first} to {chunk.index.cursor}"
            )
        return len(kept.entries)

    def seal(self) -> Summary:
        """Mark the batch as completely submitted; call it again if Redis has lost the mark.

        Raises:
            BatchConflict: the batch has more lines than this file.
            BatchChanged: the batch was deleted.
            WritesLost: (a BatchChanged) Redis has lost chunks of the batch.
        """
        summary = self._summary
        batch = self.store.batch(self._id)
        reason = ""
        if batch is not None and batch.number("valid") == 0 and not batch.stopped:
            reason = self._why_nothing_runs(batch)
        answer = self._submitted.send(
            lambda: self.store.seal(summary.batch, self._end, reason, self._expected(batch))
        )
        if answer.answer == "at" or (answer.answer == "moved" and answer.cursor < self._end[0]):
            raise writes_lost(self._id, answer)
        if answer.answer in ("moved", "sealed") and (answer.cursor, answer.digest) != self._end:
            raise different_file(
                self._id, f"this one ends at line {self._end[0]}, the batch has {answer.cursor}"
            )
        after = self.store.batch(self._id)
        if answer.answer == "gone" or after is None or after.created != summary.batch.created:
            raise self._submitted.gone()
        if not after.sealed:
            raise end_lost(self._id)
        summary.batch = after
        return summary

    def _expected(self, batch: Batch | None) -> bytes:
        """Return the expected tokens and time, which `status` shows; b'' for a run's window."""
        if batch is None or not batch.number("valid") or self.submission.window is not None:
            return b""
        # Known answers and the lines that --dedupe does not compute need no tokens and no time.
        answered = batch.number("cached") + batch.number("identical")
        requests = max(0, batch.number("valid") - answered)
        reads = OutlookReads.using(self.store)
        workers = reads.workers_of(batch.queues)
        outlook = reads.outlook_of(batch.queues, workers)
        work = Work.of(batch)._replace(left=requests)
        return expected(self._sample, work, workers, outlook)

    def _why_nothing_runs(self, batch: Batch) -> str:
        total = batch.number("total")
        if total == 0:
            return "the file has no request lines"
        first = self._summary.first_error or "see the batch's results"
        if not self._summary.first_error:  # an earlier submit has read the line
            first_id = next(self.store.index(self._id)).request_ids(self._id)[:1]
            for raw in filter(None, self.store.results(first_id)):
                first = error_of(raw).message
        return f"no valid line: all {total} are wrong; the first: {first}"
