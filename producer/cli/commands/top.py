"""`producer top`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from contract.batch import Batch
from contract.redis.announcements import is_alive
from contract.redis.history import HistoryReads, Minute
from contract.redis.waiting import WaitingReads
from producer.cli.context import Context, pass_context
from producer.queue_workers import clock_text
from producer.time_left import batch_seconds_left, pace_of_queue

#: Seconds between two updates; workers write their state to Redis once a second.
REFRESH_S = 1.0
#: Most rows of workers and of batches (a terminal is small), and most batches that are read.
WORKERS, BATCHES, BATCHES_READ = 12, 8, 100
#: Characters for shares from 0 to 1.
_TICKS = " ▁▂▃▄▅▆▇█"
_RATES = ("prompt_tokens", "completion_tokens", "completed", "other")


@click.command("top")
@click.option(
    "--once",
    is_flag=True,
    help="Print the current state and exit; also the default if stdout is not a terminal.",
)
@pass_context
def command(context: Context, *, once: bool) -> None:
    """Show all workers live: tokens/s, slots, waiting requests, workers, batches.

    End it with Ctrl-C. The page /ui of `producer serve` shows the same.
    """
    fleet, console = _Fleet(context), Console()
    if once or not sys.stdout.isatty():
        console.print(fleet.render())
        return
    try:
        with Live(fleet.render(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH_S)
                live.update(fleet.render(), refresh=True)
    except KeyboardInterrupt:
        return


class _Fleet:
    """Reads the state of all workers repeatedly; rates are the change since the last read."""

    def __init__(self, context: Context) -> None:
        self._store = context.store
        self._queue = context.settings.queue
        self._waiting = WaitingReads.using(self._store)
        self._ring = HistoryReads.using(self._store)
        self._last: tuple[float, dict[str, dict[str, int]]] | None = None

    def render(self) -> RenderableType:
        workers = [worker for worker in self._waiting.announcements() if is_alive(worker)]
        queues = sorted({self._queue, *(str(worker["queue"]) for worker in workers)})
        waiting = sum(self._waiting.waiting_totals(queues).values())
        minutes = self._ring.day(queues, 61)
        head = _head(self._rates(workers, minutes[-2]), workers, waiting, spark(minutes[:-1]))
        states = self._store.states(self._store.newest_ids(BATCHES_READ))
        batches = sorted((s for s in states if s is not None), key=lambda batch: batch.finished)
        return Group(head, _workers_table(workers), self._batches_table(batches[:BATCHES], workers))

    def _rates(self, workers: list[dict[str, Any]], last_minute: Minute) -> dict[str, float]:
        """Return rates per second since the last read; the first time, of the last full minute."""
        now = time.monotonic()
        totals = {str(worker["id"]): worker.get("done") or {} for worker in workers}
        last, self._last = self._last, (now, totals)
        if last is None:
            return {name: getattr(last_minute, name) / 60 for name in _RATES}
        seconds = max(0.001, now - last[0])
        return {
            name: sum(
                max(0, done.get(name, 0) - last[1].get(worker, done).get(name, 0))
                for worker, done in totals.items()
            )
            / seconds
            for name in _RATES
        }

    def _batches_table(self, batches: list[Batch], workers: list[dict[str, Any]]) -> Table:
        running = {batch.fields.get("queue", "") for batch in batches if not batch.finished}
        paces = {
            queue: pace_of_queue(self._store, queue, (w for w in workers if w["queue"] == queue))
            for queue in running
        }
        table = _table("BATCH", "STATE", ">DONE", ">OF", ">FAILED", ">REQUESTS/S", ">LEFT")
        for batch in batches:
            pace = None if batch.finished else paces[batch.fields.get("queue", "")]
            seconds = batch.seconds or max(0.001, time.time() - int(batch.created) / 1000)
            left_s = batch_seconds_left(batch, pace)
            table.add_row(
                _escaped(batch.id),
                batch.status,
                f"{batch.terminal:,}",
                f"{batch.number('total'):,}",
                f"{batch.number('failed') + batch.number('expired'):,}",
                f"{batch.terminal / seconds:,.1f}",
                "" if left_s is None else clock_text(left_s),
            )
        return table


def spark(minutes: Sequence[Minute]) -> str:
    """Return the share of slots in use as text, a character for each minute."""
    return "".join(_TICKS[round((minute.fill or 0.0) * (len(_TICKS) - 1))] for minute in minutes)


def _head(
    rates: dict[str, float], workers: list[dict[str, Any]], waiting: int, last_hour: str
) -> Text:
    slots = sum(int(worker.get("slots") or 0) for worker in workers)
    lines = [
        f"{rates['completion_tokens']:,.0f} tokens/s written, {rates['prompt_tokens']:,.0f} read, "
        f"{rates['completed'] + rates['other']:,.1f} requests/s",
        f"{sum(map(_running, workers)):,} of {slots:,} slots in use, {waiting:,} requests wait, "
        f"{len(workers):,} workers",
        f"slots in use, last hour [{last_hour}]",
    ]
    if not workers:
        lines.append("no worker is running: `producer doctor` checks for further causes")
    return Text("\n".join(lines) + "\n")


def _running(worker: dict[str, Any]) -> int:
    return min(int(worker.get("slots") or 0), int(worker.get("in_flight") or 0))


def _workers_table(workers: list[dict[str, Any]]) -> Table:
    table = _table("WORKER", "STATE", "MODEL", ">SLOTS", ">DEATHS")
    for worker in sorted(workers, key=lambda w: (-_running(w), str(w["id"])))[:WORKERS]:
        model = str(worker.get("model") or worker["queue"]).rstrip("/").rpartition("/")[2]
        slots = f"{_running(worker):,} / {int(worker.get('slots') or 0):,}"
        texts = map(_escaped, (str(worker["id"]), str(worker.get("state", "")), model))
        table.add_row(*texts, slots, str(worker.get("deaths", 0)))
    if len(workers) > WORKERS:
        table.add_row(f"… and {len(workers) - WORKERS:,} more")
    return table


def _escaped(text: str) -> str:
    """Return text without rich's markup and control characters."""
    return escape("".join(char if char.isprintable() else "?" for char in text))


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        right = head.startswith(">")
        table.add_column(
            head.removeprefix(">"), justify="right" if right else "left", no_wrap=right
        )
    return table
