"""`producer top`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from contract.batch import Batch
from contract.redis.announcements import is_alive
from contract.redis.history import HistoryReads, Minute
from contract.redis.waiting import WaitingReads
from producer.cli.context import Context, pass_context
from producer.queue_workers import clock_text
from producer.time_left import Pace, batch_seconds_left, pace_of_queue

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Between two looks, in seconds: workers announce themselves once a second.
LOOK_S = 1.0
#: Lines of each table: a terminal has few, and a fleet may have a thousand workers.
WORKERS, BATCHES, LOOKED_AT = 12, 8, 100
_TICKS = " ▁▂▃▄▅▆▇█"
_RATES = ("prompt_tokens", "completion_tokens", "completed", "other")


@click.command("top")
@click.option("--once", is_flag=True, help="Print what is now, and end; so does a pipe.")
@pass_context
def command(context: Context, *, once: bool) -> None:
    """Show the fleet while it works: tokens/s, slots, what waits, workers, batches.

    It ends with Ctrl-C. `producer serve` has the same as a page, at /ui.
    """
    # Only a terminal needs these: 80 ms.
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    look = Look(context)
    console = Console()
    if once or not sys.stdout.isatty():
        console.print(look.shown())
        return
    try:
        with Live(look.shown(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(LOOK_S)
                live.update(look.shown(), refresh=True)
    except KeyboardInterrupt:
        return


class Look:
    """Reads what there is, again and again; rates are from one look to the next."""

    def __init__(self, context: Context) -> None:
        self._store = context.store
        self._queue = context.settings.queue
        self._fleet = WaitingReads.using(self._store)
        self._ring = HistoryReads.using(self._store)
        self._before: tuple[float, dict[str, dict[str, int]]] | None = None

    def shown(self) -> RenderableType:
        """Return what is to be seen now."""
        from rich.console import Group  # noqa: PLC0415

        workers = [one for one in self._fleet.announcements() if is_alive(one)]
        queues = sorted({self._queue, *(str(one["queue"]) for one in workers)})
        waiting = self._fleet.waiting_totals(queues)
        minutes = self._ring.day(queues, 61)
        rates = self._rates(workers, minutes)
        states = self._store.states(self._store.newest_ids(LOOKED_AT))
        found = [one for one in states if one is not None]
        batches = sorted(found, key=lambda one: one.finished)[:BATCHES]
        parts = [_head(rates, workers, waiting, minutes), _workers(workers)]
        return Group(*parts, _batches(batches, self._paces(batches, workers), time.time()))

    def _paces(self, batches: list[Batch], workers: list[dict[str, Any]]) -> dict[str, Pace | None]:
        """Return at what pace the queues work of whose batches one runs."""
        return {
            queue: pace_of_queue(self._store, queue, (w for w in workers if w["queue"] == queue))
            for queue in {one.fields.get("queue", "") for one in batches if not one.finished}
        }

    def _rates(self, workers: list[dict[str, Any]], minutes: list[Minute]) -> dict[str, float]:
        """Return what is done a second; the first time, the mean of the last whole minute."""
        now = time.monotonic()
        totals = {str(one["id"]): one.get("done") or {} for one in workers}
        before, self._before = self._before, (now, totals)
        if before is None:
            return {name: getattr(minutes[-2], name) / 60 for name in _RATES}
        seconds = max(0.001, now - before[0])
        return {
            name: sum(
                max(0, done.get(name, 0) - before[1].get(worker, done).get(name, 0))
                for worker, done in totals.items()
            )
            / seconds
            for name in _RATES
        }


def spark(minutes: list[Minute]) -> str:
    """Return which share of the slots was in use, a character for a minute."""
    return "".join(_TICKS[round((minute.fill or 0.0) * (len(_TICKS) - 1))] for minute in minutes)


def _head(
    rates: dict[str, float],
    workers: list[dict[str, Any]],
    waiting: dict[str, int],
    minutes: list[Minute],
) -> RenderableType:
    from rich.text import Text  # noqa: PLC0415

    slots = sum(int(one.get("slots") or 0) for one in workers)
    running = sum(_running(one) for one in workers)
    requests = rates["completed"] + rates["other"]
    lines = [
        f"{rates['completion_tokens']:,.0f} tokens/s written, {rates['prompt_tokens']:,.0f} read, "
        f"{requests:,.1f} requests/s",
        f"{running:,} of {slots:,} slots in use, {sum(waiting.values()):,} requests wait, "
        f"{len(workers):,} workers",
        f"slots in use, last hour [{spark(minutes[:-1])}]",
    ]
    if not workers:
        lines.append("no worker is running: `producer doctor` says what else is in the way")
    return Text("\n".join(lines) + "\n")


def _running(worker: dict[str, Any]) -> int:
    return min(int(worker.get("slots") or 0), int(worker.get("in_flight") or 0))


def _workers(workers: list[dict[str, Any]]) -> Any:
    from rich.markup import escape  # noqa: PLC0415

    table = _table("WORKER", "STATE", "MODEL", ">SLOTS", ">DEATHS")
    for one in sorted(workers, key=lambda w: (-_running(w), str(w["id"])))[:WORKERS]:
        model = str(one.get("model") or one["queue"]).rstrip("/").rpartition("/")[2]
        slots = f"{_running(one):,} / {int(one.get('slots') or 0):,}"
        texts = (str(one["id"]), str(one.get("state", "")), model)
        table.add_row(*map(escape, map(_plain, texts)), slots, str(one.get("deaths", 0)))
    if len(workers) > WORKERS:
        table.add_row(f"… and {len(workers) - WORKERS:,} more")
    return table


def _batches(batches: list[Batch], paces: dict[str, Pace | None], now: float) -> Any:
    from rich.markup import escape  # noqa: PLC0415

    table = _table("BATCH", "STATE", ">DONE", ">OF", ">FAILED", ">REQUESTS/S", ">LEFT")
    for one in batches:
        done, total = one.terminal, one.number("total")
        seconds = one.seconds or max(0.001, now - int(one.created) / 1000)
        rate = done / seconds
        pace = None if one.finished else paces[one.fields.get("queue", "")]
        seconds_left = batch_seconds_left(one, pace)
        shown = "" if seconds_left is None else clock_text(seconds_left)
        failed = one.number("failed") + one.number("expired")
        row = (f"{done:,}", f"{total:,}", f"{failed:,}", f"{rate:,.1f}", shown)
        table.add_row(escape(_plain(one.id)), one.status, *row)
    return table


def _plain(text: str) -> str:
    """Return a text without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _table(*heads: str) -> Any:
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        right = head.startswith(">")
        table.add_column(
            head.removeprefix(">"), justify="right" if right else "left", no_wrap=right
        )
    return table
