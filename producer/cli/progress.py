"""Shows progress on stderr: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Self

from contract.batch import Batch
from contract.failures import failures_of, failures_so_far
from contract.redis.batches import BatchStore
from producer.batch_watch import BatchWatch
from producer.queue_workers import BatchWorkers, clock_text, left_text
from producer.rates import Window
from producer.stalls import STOPPED_S, LeasesLost
from producer.time_left import Outlook, OutlookReads, seconds_left, works_by_queue

if TYPE_CHECKING:
    from rich.progress import Progress

#: Seconds between two plain lines.
PLAIN_EVERY_S = 5.0
#: Seconds after which a plain line with the same text is printed again.
REPEAT_S = 60.0
#: Seconds between two updates of a bar.
BAR_EVERY_S = 0.1
#: Seconds between two reads of a batch.
POLL_S = 0.3
#: Seconds between two reads of the workers' announcements, which they write as often.
WORKERS_EVERY_S = 1.0
#: Terminal columns of a bar with its elapsed time, and of the text next to it. A narrower terminal
#: shows no bar, and only the end of a long batch id.
_BAR_COLUMNS, _TEXT_COLUMNS = 42, 60


def tell(text: str) -> None:
    """Print a message on stderr, if that is open."""
    if sys.stderr is not None:  # without stderr, print() would use stdout
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the only print()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, for example `1 request` or `2 requests`."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


#: Text about a run whose requests have not ended.
RUN_GOES_ON = "If its `producer run` has ended, the same command goes on."
CANCELLED_RUN = (
    "Its `producer run` writes the output, with all other lines as cancelled. If that command "
    "has ended, start it once more."
)


def waits_for_run(batch: Batch) -> str:
    """Return a text if all requests that a run has queued have ended; '' otherwise."""
    return f"What it has queued is done. {RUN_GOES_ON}" if batch.waits_for_run else ""


class Meter:
    """A line of progress. `total` has the same unit as `done` of `update`; None if unknown."""

    def __init__(self, title: str, total: float | None = None) -> None:
        self._title = title
        self._total = total
        self._rich: Progress | None = None
        #: Terminal columns for the text; None without a limit.
        self.width: int | None = None
        self._next_at = time.monotonic() + PLAIN_EVERY_S
        self._last_text, self._repeat_at, self._last_note = "", 0.0, ""

    def __enter__(self) -> Self:
        if sys.stderr is not None and sys.stderr.isatty():
            # These imports take 80 ms, and only a terminal needs them.
            from rich.console import Console  # noqa: PLC0415
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

            console, title = Console(stderr=True), self._title
            wide = console.width - len(title) - _BAR_COLUMNS >= _TEXT_COLUMNS
            most = console.width // 5
            if not wide and len(title) > most:  # ids of one day differ at their ends
                title = "…" + title[1 - most :]
            self.width = console.width - len(title) - (_BAR_COLUMNS if wide else 1)
            text = TextColumn("{task.fields[text]}", markup=False)
            columns = (BarColumn(bar_width=30), text, TimeElapsedColumn()) if wide else (text,)
            self._rich = Progress(
                TextColumn("{task.description}", markup=False), *columns, console=console
            )
            self._rich.add_task(title, total=self._total, text="")
            self._rich.start()
            self._next_at = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich is not None:
            self._rich.stop()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._rich is not None:
            self._rich.console.print(f"{self._title}: {text}", markup=False, highlight=False)
        else:
            tell(f"{self._title}: {text}")

    def _note_once(self, text: str) -> None:
        """Print a line that stays, unless only the numbers in it have changed."""
        words = re.sub(r"\d+", "", text)
        if text and words != self._last_note:
            self._last_note = words
            self.note(text.lstrip(",; "))

    def due(self) -> bool:
        """Whether `update` would print now. Callers check it before they build a costly text."""
        return time.monotonic() >= self._next_at

    def update(
        self,
        done: float,
        text: str,
        total: float | None = None,
        *,
        more: str = "",
        force: bool = False,
    ) -> None:
        """Show the progress. Plain lines appear every PLAIN_EVERY_S, or with `force`.

        A line that has not changed appears every REPEAT_S. `more` follows the text; if it does not
        fit into the terminal's line, it is printed once as a line of its own.
        """
        if self.width is None or len(text + more) <= self.width:
            text += more
        else:
            self._note_once(more)
        if self._rich is not None:
            task = self._rich.task_ids[0]
            self._rich.update(task, completed=done, text=text, total=total or self._total)
            self._next_at = time.monotonic() + BAR_EVERY_S
        elif force or self.due():
            now = time.monotonic()
            self._next_at = now + PLAIN_EVERY_S
            if force or text != self._last_text or now >= self._repeat_at:
                self._last_text, self._repeat_at = text, now + REPEAT_S
                tell(f"{self._title}: {text}")


class SubmitPause:
    """Measures the time since an unsealed batch got its last line."""

    def __init__(self) -> None:
        self._last: tuple[bool, int] | None = None
        self._since = 0.0

    def add(self, batch: Batch) -> float:
        """Add the batch's current state; return the seconds since it last changed."""
        now = time.monotonic()
        state = batch.sealed, batch.number("cursor") + batch.number("planned")
        if state != self._last:
            self._last, self._since = state, now
        return now - self._since


class FailureNews:
    """Decides when the failures of a watched batch are printed.

    They are printed for the first time when ten requests of the batch have ended, and again when an
    error code is new or ten times as many requests have failed.
    """

    def __init__(self) -> None:
        self._codes = frozenset[str]()
        self._count = 0

    def add(self, batch: Batch) -> str:
        """Add the batch's current state; return the text to print now, or ''."""
        if not (text := failures_so_far(batch)):
            return ""
        failures, count = failures_of([batch]), batch.number("failed")
        codes = frozenset(one.code for one in failures)
        if codes <= self._codes and count < 10 * self._count:
            return ""
        self._codes, self._count = codes, count
        return text


class _WorkersOf:
    """Reads every WORKERS_EVERY_S the states of a batch's workers."""

    def __init__(self, store: BatchStore) -> None:
        self._workers = BatchWorkers(store)
        self._read_at = -WORKERS_EVERY_S
        self._text, self._well = "", True

    def text(self, batch: Batch, *, idle: bool) -> str:
        """Return a clause about them; '' if all are well and the batch is not `idle`."""
        now = time.monotonic()
        if now - self._read_at >= WORKERS_EVERY_S:
            self._read_at, (self._text, self._well) = now, self._workers.state(batch)
        return self._text if idle or not self._well else ""


class _TimeLeft:
    """Estimates when a batch ends, and reads every WORKERS_EVERY_S what that needs."""

    def __init__(self, store: BatchStore) -> None:
        self._reads = OutlookReads.using(store)
        self._read_at = -WORKERS_EVERY_S
        self._outlooks: dict[str, Outlook | None] = {}

    def of(self, batch: Batch) -> float | None:
        """Return the seconds until the batch ends; None if it has ended, or if that is unknown."""
        if batch.finished:
            return None
        now = time.monotonic()
        if now - self._read_at >= WORKERS_EVERY_S:
            self._read_at, self._outlooks = now, self._reads.outlooks(batch.queues)
        return seconds_left(works_by_queue(batch), self._outlooks)


def describe(
    batch: Batch,
    requests_per_s: float | None,
    tokens_per_s: float | None,
    quiet_s: float = 0.0,
    width: int | None = None,
    left_s: float | None = None,
) -> str:
    """Return a line about a batch, without the rates that do not fit into `width` columns.

    Rates that are not known yet are None.
    `quiet_s` is the seconds since an unsealed batch got its last line, `left_s` those to its end.
    """
    counts = [f"{batch.done}/{batch.number('total')}{'+' * batch.may_grow} done"]
    for name in ("failed", "cancelled", "expired"):
        if batch.number(name):
            counts.append(f"{batch.number(name)} {name}")
    rates = []
    # Without any, a batch that has ended had ended before this command.
    if requests_per_s or tokens_per_s or not batch.finished:
        known = (requests_per_s, "{:.1f} requests/s"), (tokens_per_s, "{:.0f} tokens/s")
        rates = [text.format(rate) for rate, text in known if rate is not None]
    state = []
    if not batch.sealed:
        state.append(unsealed(batch, quiet_s))
    elif left_s is not None and not batch.finished:
        state.append(f"ETA {left_text(left_s)}")
    if "cancelling" in batch.fields and not batch.finished:
        state.append("cancelling")
    while width is not None and rates and len(", ".join(counts + rates + state)) > width:
        rates.pop()
    return ", ".join(counts + rates + state)


def unsealed(batch: Batch, quiet_s: float) -> str:
    """Return a text about a batch that is being submitted, or whose submit may have stopped."""
    read = f"{batch.number('cursor')} lines read"
    if quiet_s < STOPPED_S:
        return f"still being submitted ({read})"
    return (
        f"not submitted to its end ({read}, no more for {clock_text(quiet_s)}): if its "
        "`producer submit` no longer runs, fix the file if it was refused; the same command with "
        f"--batch-id {batch.id} queues the missing lines"
    )


def watch(store: BatchStore, batch: Batch, *, may_reopen: bool = True) -> Batch:
    """Show a batch's progress until it ends; return its last state.

    Without `may_reopen`, raises BatchChanged if Redis has lost the seal of the batch.
    """
    changes = BatchWatch(store, batch, "it was watched", may_reopen=may_reopen)
    rates, pause, news, left = Window(), SubmitPause(), FailureNews(), _TimeLeft(store)
    workers, leases = _WorkersOf(store), LeasesLost(store)
    first = True
    with Meter(batch.id) as meter:
        while True:
            batch = changes.state()
            requests, tokens = rates.add(batch.done, batch.number("completion_tokens"))
            speed: tuple[float | None, float | None] = None, None
            if rates.span:  # the first read gives no rate
                speed = requests, tokens
            # The callers print the failures of a batch that has ended.
            if not batch.finished and (failing := news.add(batch)):
                meter.note(failing)
            text, more = describe(batch, *speed, pause.add(batch), meter.width, left.of(batch)), ""
            waits = batch.terminal < batch.number("total") or batch.sealed
            idle = not any(speed)
            if waits and not batch.finished and (idle or not batch.waits_for_run):
                state = waits_for_run(batch) or workers.text(batch, idle=idle)
                more += f", {state}" if state else ""
            if not batch.finished and (lost := leases.text(batch)):
                more += f"; {lost}"
            meter.update(batch.done, text, batch.number("total"), more=more, force=first)
            first = False
            if batch.finished:
                return batch
            time.sleep(POLL_S)
