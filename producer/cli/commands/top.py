"""Implements `producer top`, which shows all workers, queues and batches live."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from contract.batch import Batch
from contract.redis.announced_servers import shared_servers
from contract.redis.announcements import is_alive, model_name, queues_of
from contract.redis.history import Minute
from contract.redis.waiting import WaitingReads
from producer.cli.context import Context, pass_context
from producer.cli.progress import counted
from producer.model_states import last_swaps, model_states
from producer.over_http import HttpBatches
from producer.queue_workers import clock_text, left_text
from producer.rates import WINDOW_S, Window
from producer.stalls import Stall, StallReads, model_of
from producer.time_left import OutlookReads, seconds_left, works_by_queue

#: Seconds between two updates; workers write their state to Redis once a second.
REFRESH_S = 1.0
#: Seconds between the two reads of `--once`; each worker writes its state at least once meanwhile.
ONCE_S = 2.0
#: Most rows of workers, batches, models, swaps and servers (a terminal is small).
WORKERS, BATCHES, MODELS, SWAPS, SERVERS = 12, 8, 8, 4, 8
#: Columns of the text if stdout is not a terminal: ids of batches over HTTP are not cut.
PLAIN_COLUMNS = 120
#: Most batches that are read.
BATCHES_READ = 100
#: Characters for the shares 0 to 1, in equal steps.
_TICKS = " ▁▂▃▄▅▆▇█"
#: Counters in a worker's announcement and in a minute of the history, which give the rates.
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
    fleet, live_here = _Fleet(context), sys.stdout.isatty()
    console = Console() if live_here else Console(width=PLAIN_COLUMNS)
    if once or not live_here:
        fleet.render()  # rates are the change between two reads
        time.sleep(ONCE_S)
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
        self._settings = context.settings
        self._queue = context.settings.queue
        self._waiting = WaitingReads.using(self._store)
        self._reads = OutlookReads.using(self._store)
        self._stalls = StallReads.using(self._store)
        self._last: tuple[float, dict[str, dict[str, int]]] | None = None
        self._windows: dict[str, Window] = {}

    def render(self) -> RenderableType:
        """Read the current state; return it as text and tables."""
        workers = [worker for worker in self._waiting.announcements() if is_alive(worker)]
        states = self._store.states(self._store.newest_ids(BATCHES_READ))
        found = HttpBatches.using(self._store).shown([s for s in states if s is not None])
        batches = sorted(found, key=lambda batch: batch.finished)
        served = {queue for each in workers for queue in queues_of(each)}
        unfinished = [batch for batch in batches if not batch.finished]
        asked = {queue for batch in unfinished for queue in batch.queues}
        queues = sorted({self._queue, *served, *asked})
        waiting = self._waiting.waiting_totals(queues)
        minutes = self._reads.day(queues, 61)
        rates, last_hour = self._rates(workers, minutes[-2]), spark(minutes[:-1])
        head = _head(rates, workers, sum(waiting.values()), last_hour)
        return Group(
            head,
            *_banners(self._stalls.stalls(self._settings, queues, unfinished)),
            _workers_table(workers, self._queue),
            *_server_tables(workers),
            *_model_tables(workers, waiting),
            self._batches_table(batches[:BATCHES]),
            self._rates_note(batches[:BATCHES]),
        )

    def _rates(self, workers: list[dict[str, Any]], last_minute: Minute) -> dict[str, float]:
        """Return rates per second since the last read; the first call, those of the last minute."""
        now = time.monotonic()
        totals = {str(worker["id"]): worker.get("done") or {} for worker in workers}
        last, self._last = self._last, (now, totals)
        if last is None:
            return {name: getattr(last_minute, name) / 60 for name in _RATES}
        last_at, last_totals = last
        seconds = max(0.001, now - last_at)
        return {
            name: sum(
                max(0, done.get(name, 0) - last_totals.get(worker, done).get(name, 0))
                for worker, done in totals.items()
            )
            / seconds
            for name in _RATES
        }

    def _batches_table(self, batches: list[Batch]) -> Table:
        queues = (queue for batch in batches if not batch.finished for queue in batch.queues)
        outlooks, rates = self._reads.outlooks(queues), self._batch_rates(batches)
        table = _table("BATCH", "STATE", ">DONE", ">OF", ">FAILED", ">REQUESTS/S", ">LEFT")
        for batch in batches:
            left_s = None if batch.finished else seconds_left(works_by_queue(batch), outlooks)
            rate = rates.get(batch.id, batch.rate)
            table.add_row(
                _escaped(batch.id),
                batch.status,
                f"{batch.done:,}",
                f"{batch.number('total'):,}{'+' * batch.may_grow}",
                f"{batch.number('failed'):,}",
                "" if rate is None else f"{rate:,.1f}",
                "" if left_s is None else left_text(left_s),
            )
        return table

    def _batch_rates(self, batches: list[Batch]) -> dict[str, float]:
        """Return the requests/s of unfinished batches, from the second read on."""
        self._windows = {
            batch.id: self._windows.get(batch.id) or Window()
            for batch in batches
            if not batch.finished
        }
        done = {batch.id: batch.done for batch in batches}
        found = {name: window.add(done[name])[0] for name, window in self._windows.items()}
        return {name: rate for name, rate in found.items() if self._windows[name].span}

    def _rates_note(self, batches: list[Batch]) -> Text:
        """Return a line about the batches' rates and the mark +."""
        spans = [window.span for window in self._windows.values()]
        last_s = min(WINDOW_S, max(1.0, max(spans, default=WINDOW_S)))
        return Text(
            f"requests/s of a batch: while it runs, of the last {last_s:.0f} s; then of all its "
            "time; none after a retry"
            + ("\n+: the run may read more lines" if any(b.may_grow for b in batches) else "")
        )


def spark(minutes: Sequence[Minute]) -> str:
    """Return the share of slots in use as text, a character for each minute."""
    return "".join(_TICKS[round((minute.fill or 0.0) * (len(_TICKS) - 1))] for minute in minutes)


def _head(
    rates: dict[str, float], workers: list[dict[str, Any]], waiting: int, last_hour: str
) -> Text:
    seen = [worker for worker in workers if not worker.get("overdue")]
    unseen = f", {len(workers) - len(seen)} not seen lately" if len(seen) < len(workers) else ""
    slots = sum(int(worker.get("slots") or 0) for worker in seen)
    lines = [
        f"{rates['completion_tokens']:,.0f} tokens/s written, {rates['prompt_tokens']:,.0f} read, "
        f"{rates['completed'] + rates['other']:,.1f} requests/s",
        f"{sum(map(_running, seen)):,} of {slots:,} slots in use, "
        f"{'1 request waits' if waiting == 1 else f'{waiting:,} requests wait'}, "
        f"{counted(len(seen), 'worker')}{unseen}",
        f"slots, last hour [{last_hour}]",
    ]
    if not workers:
        lines.append("no worker is running: `producer doctor` checks for further causes")
    return Text("\n".join(lines) + "\n")


def _banners(stalls: Sequence[Stall]) -> list[Text]:
    """Return the reasons why requests cannot run, each with its remedy."""
    lines = [f"{_printable(one.sentence())}: {one.advice()}\n" for one in stalls]
    return list(map(Text, lines))


def _running(worker: dict[str, Any]) -> int:
    """Return the number of slots in use; requests in flight beyond the slots wait."""
    if worker.get("overdue"):
        return 0
    return min(int(worker.get("slots") or 0), int(worker.get("in_flight") or 0))


def _workers_table(workers: list[dict[str, Any]], default_queue: str) -> Table:
    table = _table("WORKER", "STATE", "MODEL", ">SLOTS", ">DEATHS")
    for worker in sorted(workers, key=lambda w: (-_running(w), str(w["id"])))[:WORKERS]:
        model = model_name(worker) or model_of(str(worker["queue"]), default_queue)
        slots = f"{_running(worker):,} / {int(worker.get('slots') or 0):,}"
        texts = map(_escaped, (str(worker["id"]), _state_text(worker), model))
        table.add_row(*texts, slots, str(worker.get("deaths", 0)))
    if len(workers) > WORKERS:
        table.add_row(f"… and {len(workers) - WORKERS:,} more")
    return table


def _state_text(worker: dict[str, Any]) -> str:
    """Return a worker's state, or the age of its announcement if the next one is overdue."""
    if worker.get("overdue"):
        return f"seen {clock_text(worker['silent_s'])} ago"
    return str(worker.get("state", ""))


def _model_tables(workers: list[dict[str, Any]], waiting: Mapping[str, int]) -> Iterator[Table]:
    """Yield tables of models and of swaps, none if each worker has one model."""
    if states := model_states(workers, waiting):
        models = _table("MODEL", "STATE", ">WAITING", ">LOADED IN", ">CAN LOAD")
        for one in sorted(states, key=lambda state: (-state.waiting, state.model))[:MODELS]:
            numbers = (f"{n:,}" for n in (one.waiting, one.loaded, one.able))
            models.add_row(_escaped(one.model), one.text, *numbers)
        yield models
    if swaps := last_swaps(workers, SWAPS):
        table = _table("SWAP", ">AGO", ">SECONDS", "WORKER", "WHY")
        for worker, swap in swaps:
            what = f"{swap.before or '-'} > {swap.model}" + " (failed)" * swap.failed
            ago = clock_text(max(0.0, time.time() - swap.at_s))
            texts = map(_escaped, (what, ago, f"{swap.seconds:,.1f}", worker, swap.why))
            table.add_row(*texts)
        yield table


def _server_tables(workers: list[dict[str, Any]]) -> Iterator[Table]:
    """Yield the table of servers that workers share with people, none without any."""
    servers = shared_servers(workers)
    if not servers:
        return
    table = _table(
        "SERVER",
        ">OURS",
        ">OF",
        ">LIMIT",
        ">FIRST TOKEN",
        ">BETWEEN TOKENS",
        ">TOKENS TODAY",
        "WHY",
    )
    for one in servers[:SERVERS]:
        table.add_row(
            _escaped(one.server),
            f"{one.in_flight:,}",
            "" if one.in_server is None else f"{one.in_server:,}",
            f"{one.limit:,}",
            _felt(one.ttft_ms, one.ttft_ms_target),
            _felt(one.itl_ms, one.itl_ms_target),
            f"{one.tokens_today:,}",
            _escaped(one.why),
        )
    yield table


def _felt(felt_ms: float | None, target_ms: float | None) -> str:
    """Return a time and its target in ms."""
    felt, target = ("-" if ms is None else f"{ms:,.0f}" for ms in (felt_ms, target_ms))
    return f"{felt} / {target} ms"


def _escaped(text: str) -> str:
    """Return text without rich's markup and control characters."""
    return escape(_printable(text))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _table(*heads: str) -> Table:
    """Return an empty table; a column whose heading begins with `>` is aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        right = head.startswith(">")
        table.add_column(
            head.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    return table
