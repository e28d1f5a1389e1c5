"""Progress on stderr: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from contract.batch import Batch
from contract.redis.batches import BatchStore
from producer.batch_watch import BatchWatch
from producer.queue_workers import QueueWorkers, clock_text

if TYPE_CHECKING:
    from rich.progress import Progress

#: Time between two plain lines, between two states of a bar, and between two looks at a batch,
#: in seconds.
PLAIN_EVERY_S = 5.0
BAR_EVERY_S = 0.1
POLL_S = 0.3
#: Columns of a bar and the time since it began, with the spaces between, and those that the text
#: needs beside them: a narrower terminal shows no bar, and only the end of the batch's id.
_BAR, _TEXT = 42, 60
#: Rates are means over this many seconds.
_WINDOW_S = 30.0
#: A batch that got no line for so long, in seconds, before its end: its submit may have stopped.
_STOPPED_S = 10.0


def tell(text: str) -> None:
    """Write a message for people; nothing where standard error is closed from the start."""
    if sys.stderr is not None:  # print would take standard output instead
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is the one place for it


def counted(number: int, noun: str) -> str:
    """Return a number of things, as `1 request` or `2 requests`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class Meter:
    """One line of progress. `total` is in whatever unit `update` counts, None if unknown."""

    def __init__(self, title: str, total: float | None = None) -> None:
        self._title = title
        self._total = total
        self._rich: Progress | None = None
        #: Columns there are for the text, None for as many as it needs.
        self.room: int | None = None
        self._next = time.monotonic() + PLAIN_EVERY_S

    def __enter__(self) -> Self:
        if sys.stderr is not None and sys.stderr.isatty():
            # 80 ms of imports that only a terminal needs.
            from rich.console import Console  # noqa: PLC0415
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

            console = Console(stderr=True)
            wide = console.width - len(self._title) - _BAR >= _TEXT
            title = self._title if wide else _end_of(self._title, console.width // 5)
            self.room = console.width - len(title) - (_BAR if wide else 1)
            text = TextColumn("{task.fields[text]}", markup=False)
            whole = (BarColumn(bar_width=30), text, TimeElapsedColumn()) if wide else (text,)
            self._rich = Progress(
                TextColumn("{task.description}", markup=False), *whole, console=console
            )
            self._rich.add_task(title, total=self._total, text="")
            self._rich.start()
            self._next = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich is not None:
            self._rich.stop()

    def due(self) -> bool:
        """Whether an update would be shown now; ask first where composing it costs something."""
        return time.monotonic() >= self._next

    def update(
        self, done: float, text: str, total: float | None = None, *, at_once: bool = False
    ) -> None:
        """Show how far it is; plain lines come every PLAIN_EVERY_S, or `at_once`."""
        if self._rich is not None:
            task = self._rich.task_ids[0]
            self._rich.update(task, completed=done, text=text, total=total or self._total)
            self._next = time.monotonic() + BAR_EVERY_S
        elif at_once or self.due():
            self._next = time.monotonic() + PLAIN_EVERY_S
            tell(f"{self._title}: {text}")


def _end_of(title: str, width: int) -> str:
    """Return the end of a title, by which batches of one day differ."""
    return title if len(title) <= width else "…" + title[1 - width :]


class Rates:
    """Requests and completion tokens per second over the last half minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int, int]] = deque()

    def add(self, requests: int, tokens: int) -> tuple[float, float]:
        """Take the counters of now; return (requests/s, tokens/s)."""
        now = self._clock()
        samples = self._samples
        samples.append((now, requests, tokens))
        while len(samples) > 2 and now - samples[1][0] >= _WINDOW_S:
            samples.popleft()
        then, requests_then, tokens_then = samples[0]
        span = now - then
        if span <= 0:
            return 0.0, 0.0
        # A retry takes results back, so a counter can fall.
        return max(0, requests - requests_then) / span, max(0, tokens - tokens_then) / span


def describe(
    batch: Batch,
    requests_per_s: float,
    tokens_per_s: float,
    quiet_s: float = 0.0,
    room: int | None = None,
) -> str:
    """Return one line on a running batch: done, failed, rates, time left.

    `quiet_s` is for how long no line came to a batch that is not sealed. The rates are left out
    where the line would need more than `room` columns.
    """
    total, done = batch.number("total"), batch.terminal
    parts = [f"{done}/{total} done"]
    for name in ("failed", "cancelled", "expired"):
        if batch.number(name):
            parts.append(f"{batch.number(name)} {name}")
    rates = [f"{requests_per_s:.1f} requests/s", f"{tokens_per_s:.0f} tokens/s"]
    begin, parts = parts, []
    if not batch.sealed:
        parts.append(unsealed(batch, quiet_s))
    elif requests_per_s > 0 and not batch.finished:
        parts.append(f"ETA {clock_text((total - done) / requests_per_s)}")
    if "cancelling" in batch.fields and not batch.finished:
        parts.append("cancelling")
    while room is not None and rates and len(", ".join(begin + rates + parts)) > room:
        rates.pop()
    return ", ".join(begin + rates + parts)


def unsealed(batch: Batch, quiet_s: float) -> str:
    """Say that a batch is still being submitted, or that its submit seems to have stopped."""
    read = f"{batch.number('cursor')} lines read"
    if quiet_s < _STOPPED_S:
        return f"still being submitted ({read})"
    return (
        f"not submitted to its end ({read}, no more for {clock_text(quiet_s)}): if its "
        f"`producer submit` does not run any more, the same command with --batch-id {batch.id} "
        "completes it"
    )


class SubmitPause:
    """Measures for how long a batch that is not sealed got no line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: tuple[bool, int] | None = None
        self._since = 0.0

    def look(self, batch: Batch) -> float:
        """Take the batch's state of now; return for how many seconds it has been the same."""
        now = self._clock()
        seen = batch.sealed, batch.number("cursor") + batch.number("planned")
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


def watch(store: BatchStore, batch: Batch, *, may_reopen: bool = True) -> Batch:
    """Follow a batch to its end; return its last state.

    With `may_reopen` also where Redis has lost its end, so that it is open again.

    Raises:
        BatchChanged: if it is deleted or submitted anew meanwhile, or open again.
    """
    same = BatchWatch(store, batch, "it was watched", may_reopen=may_reopen)
    rates, pause = Rates(), SubmitPause()
    workers = QueueWorkers(store, batch.fields.get("queue", ""))
    first = True
    with Meter(batch.id) as meter:
        while True:
            batch = same.state()
            speed = rates.add(batch.terminal, batch.number("completion_tokens"))
            text = describe(batch, *speed, pause.look(batch), meter.room)
            waits = batch.terminal < batch.number("total") or batch.sealed
            if waits and not (any(speed) or batch.finished):
                text += f", {workers.text()}"
            meter.update(batch.terminal, text, batch.number("total"), at_once=first)
            first = False
            if batch.finished:
                return batch
            time.sleep(POLL_S)
