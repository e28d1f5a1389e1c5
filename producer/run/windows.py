"""Runs a file of any size through a Redis of any size, in windows of lines.

Each window is a batch. Redis has two of them: workers run one while the other waits, so workers
always have requests. The results of the older window are appended to the output in input order,
then its batch is deleted. A window ends early if Redis is full: only a complete window can be
collected and deleted, which frees memory. The journal is written after the output is on disk. After
a crash, the same command truncates the output to the size in the journal, and uses the results that
workers have written meanwhile.
"""

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from contract import naming
from contract.batch import Batch
from contract.errors import BatchConflict, StoreFull
from contract.redis.batches import BatchStore
from contract.results import OUTCOMES
from contract.settings import Settings
from producer.collect.collect import Collector
from producer.input.reader import RawChunk
from producer.input.seen import SeenIds
from producer.input.source import Source
from producer.run.again import selected
from producer.run.cancelled import cancelled_lines, custom_id_of
from producer.run.journal import RunFiles, RunProgress, window_id
from producer.run.parts import Chunks, Window
from producer.run.record import RunRecord, begin_retry
from producer.run.run_time_left import RunTimeLeft, unread_lines
from producer.run.stopping import FailureLimit, RunStopped
from producer.run.window_progress import WindowProgress
from producer.submit.submission import Submission, WindowContext
from producer.submit.submit import Submitter

if TYPE_CHECKING:
    from producer.submit.order.prefix import OrderChoice

#: Most windows of a run in Redis.
WINDOWS_IN_REDIS = 2
#: Seconds between two checks whether Redis has memory again, and between two reports of a wait.
MEMORY_EVERY_S, REPORT_EVERY_S = 0.5, 1.0
#: Settings without a high-water mark (the limit of Redis's memory above which no more requests are
#: queued). The run itself checks the mark before each chunk; the submitter would wait forever.
_NO_HIGH_WATER = {"high_water": 1e9, "high_water_requests": 10**15}


@dataclass(slots=True)
class Run:
    """One run of one file, `window` lines at a time.

    `report` gets the progress, and the reason of a wait ('' after each window). `ignored` counts
    the queued lines with each ignored field. If the lines are put into another order, `choice` is
    that order and `planned_lines` their number.
    """

    store: BatchStore
    settings: Settings
    submission: Submission
    window: int
    report: Callable[[RunProgress, str], None]
    ignored: Counter[str] = field(default_factory=Counter)
    choice: "OrderChoice | None" = None
    planned_lines: int = 0
    #: Answers of this call that ended at max_tokens.
    cut: int = 0
    #: Whether this process has started the worker, so that the queue has none at first.
    local: bool = False
    #: Whether the run was cancelled.
    cancelled: bool = False
    #: Outcomes of the lines of a complete run that run again (journal.py), '' for none.
    retry: str = ""
    _report_at: float = 0.0
    _time_left: RunTimeLeft = field(init=False)
    _seen: SeenIds = field(default_factory=SeenIds)
    _record: RunRecord = field(init=False)

    def run(self, source: Source, output: Path, errors: Path) -> RunProgress:
        """Run the file, or the lines that an interrupted run has left; `end_record` is next.

        Returns:
            The progress. It is `complete` only if an earlier run had completed the file.

        Raises:
            BatchConflict: the output is not of this run, or the input has changed.
            RunStopped: too many requests failed (`stop_after`); the same command continues.
            RunCancelled: the run was cancelled; the same call writes the rest as cancelled.
            BatchChanged: a window was deleted, or Redis has lost requests of it; the same command
                submits them again.
            InputUnreadable, OutputUnwritable, StoreUnavailable: the same command continues later.
        """
        self._time_left = RunTimeLeft(self.store, self.submission.queue)
        name, seed = f"run_{secrets.token_hex(8)}", self.submission.seed
        begin = RunProgress(name, seed, source.name, source.fingerprint(), errors_file="")
        with closing(self._seen), RunFiles(output, errors, begin, self.retry) as files:
            self._delete_done(files.done)  # an earlier run may have been stopped before it did this
            earlier = begin_retry(self.store, files) if files.begins_retry else None
            if not files.done.complete:
                self._record = RunRecord(self.store, self.submission, source, files, earlier)
            limit = FailureLimit(self.store, self.submission.stop_after, files.done)
            read = source.chunks(seed, self.settings.max_line_bytes)
            if files.done.retry:
                read = selected(read, files.again)
            with closing(self._in_order(read, files)) as ordered:
                raws = Chunks(ordered)
                self._skip(raws, files)
                if not files.done.complete and self._record.cancelled:
                    self._end_cancelled(raws, files)
                self._run_windows(raws, source, files, limit)
            if source.fingerprint() != begin.fingerprint:
                raise BatchConflict(
                    f"{source.name} has changed while it was read; {files.journal.start_anew}"
                )
            self._delete_done(files.done)
            if not files.done.complete:
                self.cancelled = self._record.cancelled
            files.finish()
            return files.done

    def _in_order(self, read: Iterator[RawChunk], files: RunFiles) -> Generator[RawChunk]:
        """Yield the chunks in the submission's order; any order but `input` reads all first."""
        order, earlier = self.submission.order, files.done.plan
        if order == "input":
            yield from read
            return
        from producer.submit.order.prefix import cache_tokens  # noqa: PLC0415 - loads numpy
        from producer.submit.planned import PlannedLines  # noqa: PLC0415

        lines = PlannedLines(read, self.submission.seed, self.submission.overrides)
        with closing(lines):
            choice = lines.choose(order, cache_tokens(self.store, self.submission.queue), earlier)
            if earlier and choice.name != earlier:
                raise BatchConflict(
                    "the input has changed, or this version of warmq plans another order for it; "
                    f"go on with the version that began it, or {files.journal.start_anew}"
                )
            self.choice, self.planned_lines = choice, len(lines)
            if not earlier:
                files.settle_plan(choice.name)
            yield from lines.chunks(choice)

    def _delete_done(self, done: RunProgress) -> None:
        """Delete windows whose results are in the output; a failover may have brought some back.

        If the run reuses known answers, they stay, so that later runs find theirs.
        """
        if self.submission.reuse_s is not None:
            return
        windows = [window_id(done.name, number) for number in range(done.windows)]
        for batch_id in self.store.existing(windows):
            self.store.delete(batch_id, force=True)

    def _skip(self, raws: Chunks, files: RunFiles) -> None:
        """Read the lines whose results are in the output, and remember their custom_ids."""
        done, line, digest = files.done, 0, self.submission.seed
        while line < done.line and (raw := raws.take()) is not None:
            line, digest = raw.cursor, raw.digest
            self._pass(raw, done.name)
        if (line, digest) != (done.line, done.digest):
            ended = f"was stopped after line {done.line}"
            if done.complete:
                ended = f"is complete ({done.line} line{'s' * (done.line != 1)})"
            raise BatchConflict(
                f"the input or the options differ from those of the run that {ended}; use the same "
                f"ones, or {files.journal.start_anew}"
            )

    def _pass(self, raw: RawChunk, name: str) -> None:
        """Remember the custom_ids of a chunk that is not submitted (again)."""
        for _, text in raw.lines:
            if (custom_id := custom_id_of(text)) is not None:
                self._seen.add(naming.request_id(name, custom_id))

    def _run_windows(
        self, raws: Chunks, source: Source, files: RunFiles, limit: FailureLimit
    ) -> None:
        """Queue and collect windows to the end of the input, or until too many requests fail."""
        waiting: deque[tuple[Window, Batch]] = deque()
        while waiting or raws.peek() is not None:
            self._fill(waiting, raws, source, files, limit)
            if waiting:
                left_s = self._left_s(raws, source, waiting)
                window, batch = waiting.popleft()
                try:
                    self._collect((window.line, window.digest), batch, files, limit, left_s)
                    if waiting or raws.peek() is not None:
                        limit.check(files.done)
                except RunStopped as stop:
                    for _, later in waiting:
                        self.store.delete(later.id, force=True)
                    self._record.stop(stop.message)
                    raise
            elif raws.peek() is not None:
                self._make_room(files.done)

    def _make_room(self, done: RunProgress) -> None:
        """Delete the oldest window that is kept for later runs; without one, wait for memory."""
        windows = [window_id(done.name, number) for number in range(done.windows)]
        for batch_id in self.store.existing(windows)[:1]:
            self.store.delete(batch_id, force=True)
            return
        self._wait(MEMORY_EVERY_S, done, lambda: f"waiting: {self._why_full()}")

    def _fill(
        self,
        waiting: deque[tuple[Window, Batch]],
        raws: Chunks,
        source: Source,
        files: RunFiles,
        limit: FailureLimit,
    ) -> None:
        """Submit windows until Redis has WINDOWS_IN_REDIS; raise RunCancelled after a cancel."""
        while len(waiting) < WINDOWS_IN_REDIS and raws.peek() is not None:
            self._record.check()
            digest = waiting[-1][0].digest if waiting else files.done.digest
            batch_id = window_id(files.done.name, files.done.windows + len(waiting))
            before = limit.judged_from(files.done)
            context = WindowContext(digest, self._seen, files.done.name, before)
            submission = replace(self.submission, batch_id=batch_id, window=context)
            try:
                self._delete_misplaced(batch_id, raws, waiting)
                window = self._begin(submission, digest, source, limit)
                if window is None:
                    break
                summary = window.submitter.run(self._window_chunks(window, raws))
            except BatchConflict as error:
                self._record.check()  # a cancel has closed the window
                raise BatchConflict(
                    f"{error.message}; use the same input and options, or "
                    f"{files.journal.start_anew}"
                ) from None
            self._record.check()  # the cancel may not have seen this window
            self.ignored += summary.ignored
            waiting.append((window, summary.batch))

    def _end_cancelled(self, raws: Chunks, files: RunFiles) -> None:
        """Collect the windows of a cancelled run; write the rest of the input as cancelled."""
        name, no_limit = files.done.name, FailureLimit(self.store, "", files.done)
        for number in range(files.done.windows, files.done.windows + WINDOWS_IN_REDIS):
            batch_id = window_id(name, number)
            batch = self.store.batch(batch_id)
            if batch is None or not self._follows(batch_id, raws):
                self.store.delete(batch_id, force=True)
                continue
            self.store.cancel(batch)
            batch = self.store.batch(batch_id) or batch
            end = (files.done.line, files.done.digest)
            while (raw := raws.peek()) is not None and raw.cursor <= batch.number("cursor"):
                self._pass(raw, name)
                raws.take()
                end = (raw.cursor, raw.digest)
            self._collect(end, batch, files, no_limit, lambda: None)
        while raws.peek() is not None:
            batch_id, lines = window_id(name, files.done.windows), 0
            while lines < self.window and (raw := raws.take()) is not None:
                for line in cancelled_lines(name, batch_id, raw, self._seen):
                    files.add(line)
                    lines += 1
                end = (raw.cursor, raw.digest)
            self._commit(end, Counter(cancelled=lines), files)

    def _follows(self, batch_id: str, raws: Chunks) -> bool:
        """Return whether a stored window begins with the next chunk of the input."""
        kept, first = next(self.store.index(batch_id), None), raws.peek()
        return bool(kept and first and (kept.cursor, kept.digest) == (first.cursor, first.digest))

    def _delete_misplaced(
        self, batch_id: str, raws: Chunks, waiting: Sequence[tuple[Window, Batch]]
    ) -> None:
        """Delete a stored window that begins at another line: Redis lost the end of the last one.

        A window whose end Redis has kept is followed by the lines that its index names.
        """
        kept_end = not waiting or waiting[-1][0].sealed
        if kept_end or self.store.batch(batch_id) is None:
            return
        if not self._follows(batch_id, raws):
            self.store.delete(batch_id, force=True)

    def _begin(
        self, submission: Submission, digest: str, source: Source, limit: FailureLimit
    ) -> Window | None:
        """Return a new window, or one that an earlier run began; None if Redis is full."""
        batch = self.store.batch(submission.batch_id)
        if batch is not None:
            batch = limit.reopen(batch)
        stored = batch.number("cursor") if batch is not None else 0
        sealed = batch is not None and batch.sealed
        if not stored and self._why_full():
            return None
        try:
            batch = submission.create(self.store, source.name, kept_columns=source.output_columns)
        except StoreFull:
            return None  # results have filled Redis since the check
        unbounded = self.settings.model_copy(update=_NO_HIGH_WATER)
        submitter = Submitter(self.store, unbounded, submission, batch)
        return Window(submitter, digest, stored, sealed)

    def _why_full(self, pending: int = 0) -> str:
        return self.store.why_full(
            self.submission.queue,
            pending,
            high_water=self.settings.high_water,
            high_water_requests=self.settings.high_water_requests,
        )

    def _window_chunks(self, window: Window, raws: Chunks) -> Iterator[RawChunk]:
        """Yield a window's chunks, numbered from 0."""
        for ordinal in count():
            if ordinal and self._ends_before(window, raws.peek()):
                return
            if (raw := raws.take()) is None:
                return
            window.lines += len(raw.lines)
            window.line, window.digest, raw.ordinal = raw.cursor, raw.digest, ordinal
            window.pending.append(raw.size)
            yield raw

    def _ends_before(self, window: Window, following: RawChunk | None) -> bool:
        """Return whether a window ends before the next chunk."""
        if window.line < window.stored:
            return False
        if window.sealed or following is None or window.lines + len(following.lines) > self.window:
            return True
        return bool(self._why_full(sum(window.pending)))

    def _left_s(
        self, raws: Chunks, source: Source, waiting: Sequence[tuple[Window, Batch]]
    ) -> Callable[[], float | None]:
        """Return a function that returns the seconds to the end of the run, None if unknown."""
        ids, queued = [batch.id for _, batch in waiting], waiting[-1][0].line
        if raws.peek() is None:
            unread: float | None = 0
        elif self.choice:
            unread = max(1, self.planned_lines - queued)
        else:
            unread = unread_lines(raws.line, queued, source.position, source.size)
        self._record.note_unread(unread)
        return lambda: self._time_left.seconds(ids, unread)

    def _collect(
        self,
        end: tuple[int, str],
        batch: Batch,
        files: RunFiles,
        limit: FailureLimit,
        left_s: Callable[[], float | None],
    ) -> None:
        """Move a window's results to the files; `end` has its last line and the digest there."""
        done, outcomes = files.done, Counter[str]()
        shown = WindowProgress(self.store, left_s, starting=self.local)

        def progress() -> str:
            limit.check_window(batch.id)
            return shown.text(batch)

        collector = Collector(
            self.store, batch, follow=True, sleep=lambda wait_s: self._wait(wait_s, done, progress)
        )
        for line in collector.lines("input"):
            files.add(line)
            outcomes[line.outcome] += 1
        limit.check_window(batch.id)
        self.cut += collector.batch.number("cut")
        self._commit(end, outcomes, files, collector.batch)
        if self.submission.reuse_s is None:  # else the window stays for later runs
            self.store.delete(batch.id)

    def _commit(
        self,
        end: tuple[int, str],
        outcomes: Counter[str],
        files: RunFiles,
        window: Batch | None = None,
    ) -> None:
        """Write files and journal to disk, then the run's record in Redis; report the progress."""
        done, (line, digest) = files.done, end
        counts = {name: getattr(done, name) + outcomes[name] for name in OUTCOMES}
        files.commit(replace(done, line=line, digest=digest, windows=done.windows + 1, **counts))
        self._record.add(files.done, window)
        self.report(files.done, "")

    def _wait(self, wait_s: float, done: RunProgress, reason: Callable[[], str]) -> None:
        """Sleep, and report the reason every REPORT_EVERY_S seconds."""
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + REPORT_EVERY_S
            self.report(done, reason())
        time.sleep(wait_s)
