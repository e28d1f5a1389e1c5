"""Submits a file as one batch: validates line by line and queues a chunk at a time.

While chunks are on their way to Redis the next one is parsed. Every chunk names
the cursor and digest it follows, so that repeated, resumed and concurrent
submits of the same file queue every request once, and another file is refused.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from dataclasses import dataclass

import orjson

from contract.batch import Batch
from contract.errors import BatchConflict
from contract.index import IndexChunk
from contract.message import MessageWriter
from contract.redis.batches import BatchStore, Enqueued
from contract.settings import Settings
from producer.core.lines import LinesToMessages, PreparedChunk
from producer.core.reader import CHUNK_BYTES, RawChunk
from producer.core.same_batch import BatchChanged, WritesLost
from producer.core.seen import SeenIds
from producer.core.submission import Submission

#: Waits between looks at a Redis that is full, in seconds.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_WAKE_S = 0.5
#: Chunks on their way at once: with one, Redis would wait for each until the next is parsed.
UNDER_WAY = 2


@dataclass(slots=True)
class Summary:
    """What one submit did. `found` requests were there before it, `queued` were not;
    `without_limit` of the latter name no max_tokens."""

    batch: Batch
    lines: int = 0
    found: int = 0
    queued: int = 0
    rejected: int = 0
    without_limit: int = 0
    first_error: str = ""
    waiting: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """What a batch of some lines of a longer file shares with the others (windows.py).

    `digest` is that of the file before it; custom_ids are remembered in `seen` as requests of
    the batch `name`, whichever part they are in.
    """

    digest: str
    seen: SeenIds
    name: str


class Submitter:
    """One submit of one file. `report` is called with the summary as it grows."""

    def __init__(
        self,
        store: BatchStore,
        settings: Settings,
        submission: Submission,
        report: Callable[[Summary], None] = lambda summary: None,
        part: Part | None = None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._submission = submission
        self._report = report
        self._part = part
        self._stop = threading.Event()
        self._pending: deque[Future[None]] = deque()
        self._end = (0, part.digest if part else submission.seed)

    def create(self, input_name: str) -> Batch:
        """Make the batch, or find the one that an earlier submit has made.

        Raises:
            BatchConflict: if the batch has other options.
        """
        wanted = self._submission
        fields: dict[str, str | int] = {
            "model": wanted.model,
            "queue": wanted.queue,
            "input": input_name.encode(errors="replace").decode(),  # a file's name is any bytes
            "options": wanted.options,
        }
        _, batch = self._store.create(
            wanted.batch_id, self._end[1], fields, deadline=wanted.deadline
        )
        theirs = batch.fields.get("options", "")
        if theirs != wanted.options:
            raise BatchConflict(
                f"batch {batch.id} was submitted with other options: {theirs}, now "
                f"{wanted.options}; use the same ones, or another --batch-id"
            )
        self._writer = MessageWriter(
            batch.id, int(batch.created), batch.life, wanted.queue, wanted.priority,
            self._deadline(batch),
        )  # fmt: skip
        self._summary = Summary(batch)
        return batch

    def _deadline(self, batch: Batch) -> float | None:
        """Return the deadline for the messages, in seconds.

        From the option, not from the batch: a retry may have lifted the batch's own
        while this submit was interrupted, and all messages of a batch must agree.
        """
        text = self._submission.deadline
        if not text:
            return None
        return (int(text) + (int(batch.created) if text.startswith("+") else 0)) / 1000

    def run(self, raw_chunks: Iterator[RawChunk]) -> Summary:
        """Queue what is not queued yet, and seal the batch.

        Raises:
            BatchConflict: at the first chunk that differs from what was submitted.
            BatchChanged: if the batch is deleted meanwhile; WritesLost if Redis has lost chunks
                of it, which submitting again puts back.
            InputUnreadable: for damaged input; the batch stays open.
            StoreUnavailable: if Redis is gone or refuses; the batch stays open.
        """
        summary = self._summary
        stored = self._store.index(summary.batch.id) if summary.batch.number("cursor") else iter(())
        part = self._part
        ids = nullcontext(part.seen) if part else closing(SeenIds())
        with ids as seen, ThreadPoolExecutor(1, "warmq-enqueue") as sender:
            lines = LinesToMessages(
                summary.batch.id, self._writer, self._submission.overrides,
                self._settings.max_line_bytes, seen, part.name if part else "",
            )  # fmt: skip
            try:
                for raw in raw_chunks:
                    kept = next(stored, None)
                    if kept is not None:
                        self._skip(lines, raw, kept)
                    else:
                        prepared = lines.prepare(raw, self._end)
                        summary.without_limit += prepared.without_limit
                        summary.first_error = summary.first_error or prepared.first_error
                        self._settle(UNDER_WAY - 1)
                        self._pending.append(sender.submit(self._send, prepared))
                        del prepared
                        if raw.size > CHUNK_BYTES:
                            self._settle(0)  # it holds a huge line: one such in memory at a time
                    self._end = (raw.cursor, raw.digest)
                    summary.lines = raw.cursor
                    self._report(summary)
                self._settle(0)
            finally:
                self._stop.set()
        self._report(summary)
        return self.seal()

    def _settle(self, most: int) -> None:
        """Wait until at most so many chunks are on their way."""
        while len(self._pending) > most:
            # In turns: a Ctrl-C that comes just before an endless wait would not end it.
            while not wait([self._pending[0]], _WAKE_S).done:
                pass
            self._pending.popleft().result()

    def _skip(self, lines: LinesToMessages, raw: RawChunk, kept: IndexChunk) -> None:
        """Take a chunk as submitted before, if it is the same."""
        if (raw.cursor, raw.digest) != (kept.cursor, kept.digest):
            raise self._differs(raw.first, raw.cursor)
        for (_, custom_id, by_line), request_id in zip(
            kept.entries, kept.request_ids(self._summary.batch.id), strict=True
        ):
            if not by_line:
                lines.first_use(custom_id, request_id)
        self._summary.found += len(kept.entries)

    def _send(self, chunk: PreparedChunk) -> None:
        """Enqueue one chunk; wait while Redis is full. Runs in the sender's thread."""
        summary, wait_s = self._summary, _FIRST_WAIT_S
        while True:
            answer = self._store.enqueue(
                summary.batch, self._writer.list_key, chunk.before, chunk.index,
                chunk.messages, chunk.rejects,
                high_water=self._settings.high_water,
                high_water_requests=self._settings.high_water_requests,
            )  # fmt: skip
            if answer.answer != "full":
                break
            summary.waiting = answer.text
            self._report(summary)
            if self._stop.wait(wait_s):
                return
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
        summary.waiting = ""
        if answer.answer == "ok":
            summary.queued += len(chunk.messages)
            summary.rejected += len(chunk.rejects)
        else:
            self._compare(answer, chunk)

    def _compare(self, answer: Enqueued, chunk: PreparedChunk) -> None:
        """Accept a chunk that another submit, or a lost reply's first try, has stored."""
        batch_id = self._summary.batch.id
        if answer.answer == "gone":
            raise self._deleted()
        kept = next(self._store.index(batch_id, chunk.ordinal), None)
        if kept is None and answer.answer == "moved" and answer.cursor < chunk.before[0]:
            raise self._lost(answer)
        if kept is None:
            raise BatchConflict(
                f"batch {batch_id} was closed before line {chunk.first} (cancelled, or submitted "
                "from a shorter file); use another --batch-id"
            )
        if (kept.cursor, kept.digest) != (chunk.index.cursor, chunk.index.digest):
            raise self._differs(chunk.first, chunk.index.cursor)
        self._summary.found += len(kept.entries)

    def _differs(self, first: int, last: int) -> BatchConflict:
        return BatchConflict(
            f"batch {self._summary.batch.id} was submitted from a different file: it differs "
            f"within lines {first} to {last}; use another --batch-id"
        )

    def _deleted(self) -> BatchChanged:
        batch_id = self._summary.batch.id
        return BatchChanged(
            f"batch {batch_id} was deleted while it was submitted, or Redis has lost it",
            f"the same command with --batch-id {batch_id} submits it from its beginning",
        )

    def _lost(self, answer: Enqueued) -> WritesLost:
        batch_id = self._summary.batch.id
        return WritesLost(
            batch_id, f"of batch {batch_id} it has the lines up to {answer.cursor} only"
        )

    def seal(self) -> Summary:
        """Say that this was all; may be called again where Redis has lost it.

        Raises:
            BatchConflict: if the batch has more lines than this file.
            BatchChanged: as `run` does.
        """
        summary = self._summary
        batch_id = summary.batch.id
        batch = self._store.batch(batch_id)
        reason = ""
        if batch is not None and batch.number("valid") == 0:
            reason = self._why_nothing_runs(batch)
        answer = self._store.seal(summary.batch, self._end, reason)
        if answer.answer == "moved" and answer.cursor < self._end[0]:
            raise self._lost(answer)
        if answer.answer in ("moved", "sealed") and (answer.cursor, answer.digest) != self._end:
            raise BatchConflict(
                f"batch {batch_id} was submitted from a different file: this one ends at line "
                f"{self._end[0]}, the batch has {answer.cursor}; use another --batch-id"
            )
        after = self._store.batch(batch_id)
        if answer.answer == "gone" or after is None or after.created != summary.batch.created:
            raise self._deleted()
        summary.batch = after
        return summary

    def _why_nothing_runs(self, batch: Batch) -> str:
        total = batch.number("total")
        if total == 0:
            return "the file has no request lines"
        first = self._summary.first_error or self._stored_first_error(batch)
        return f"no valid line: all {total} are wrong; the first: {first}"

    def _stored_first_error(self, batch: Batch) -> str:
        """Return the first line's error where an earlier submit has written it."""
        for chunk in self._store.index(batch.id):
            for raw in self._store.results(chunk.request_ids(batch.id)[:1]):
                if raw is not None:
                    return str(orjson.loads(raw)["warmq"]["error"]["message"])
        return "see `producer results`"
