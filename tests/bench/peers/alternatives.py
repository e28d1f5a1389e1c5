"""warmq against what a user would pick instead: one vLLM, one file, the same machine, in turns.

Every way has its own process and its own engine of the same arguments; those that can be warm
stay so, idle while the others run. What cannot run here is named with its own words.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.common import report
from bench.peers.bare_engine import OFFLINE, BareEngine
from bench.peers.overlay import CannotRun
from bench.peers.ways import ENGINE_ARGS, MORE_ARGS, TOKENS, Client, RunBatch, Way
from bench.peers.ways_foreign import Llmq, RayData
from bench.peers.ways_queued import StockCelery, Warmq
from kit.servers.vllm_server import VllmServer

#: Requests at once of the HTTP client; the best one counts.
CONCURRENCY = (32, 64, 128, 256)
THREADS = 64
WARM_UP = 64
#: Run in every second round only: Ray's start takes most of a minute.
SELDOM = frozenset({"ray"})
#: The same process as `bare`, told otherwise.
MORE_BARE = ("cumulative", "frozen")
#: Requests that the one-after-another client asks.
FEW = 50
#: Part B: files one after another, and their answers' length in tokens.
FILE_LINES, FILE_TOKENS = 1000, 4
TITLE = f"one vLLM, chats x {TOKENS} tokens; ratios are of runs of one round"
EXPECTED = {
    "written": "before the first full run",
    "warmq_to_client": 1.0,
    "warmq_to_run_batch": 1.05,
    "warmq_to_one_by_one": 10,
    "warmq_to_celery": 1.15,
    "warmq_to_llmq": 1.2,
    "warmq_to_ray": 1.3,
    "warmq_to_offline": 0.9,
    "run_batch_files_to_warmq": 8,
    "why": "the model takes most of both cores, so what a way costs in CPU a request shows; "
    "on an H200, one run each, client and run-batch were as fast as the engine alone",
}
BARS = {
    "warmq_to_client": 0.97,
    "warmq_to_run_batch": 1.0,
    "warmq_to_one_by_one": 1.0,
    "warmq_to_celery": 1.0,
    "warmq_to_llmq": 1.0,
    "warmq_to_ray": 1.0,
    "run_batch_files_to_warmq": 4.0,
}


class Field:
    """The ways that can run here, and what was found of each."""

    def __init__(self) -> None:
        self.ways: dict[str, Way] = {}
        self.start_s: dict[str, float] = {}
        self.not_run: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []

    def enter(self, key: str, way: Way, stack: ExitStack) -> None:
        """Start a way; note the reason where it cannot run."""
        stack.callback(way.stop)
        began = time.monotonic()
        try:
            way.start()
            self.start_s[key] = time.monotonic() - began if way.warm else 0.0
            if way.warm and not isinstance(way, Client):  # the sweep has warmed the server
                way.run(WARM_UP)
        except CannotRun as error:
            self.not_run[way.name] = str(error)
            return
        self.ways[key] = way

    def round(self, number: int, count: int, skip: frozenset[str] = frozenset()) -> None:
        """Run every way once, in an order that rotates with the round."""
        keys = [key for key in self.ways if key not in skip]
        for key in report.in_turn(keys, number):
            asked = min(count, FEW) if key == "one_by_one" else count
            try:
                found = self.ways[key].run(asked)
            except CannotRun as error:
                self.not_run[self.ways.pop(key).name] = str(error)
                continue
            self.runs.append({"way": key, "round": number, "requests": asked, **found})
            rate, wall = found["tokens_per_s"], found["wall_s"]
            print(f"  {key}: {rate:.0f} tokens/s, {wall:.1f} s", flush=True)

    def values(self, key: str, figure: str) -> dict[int, float]:
        """Return a figure of a way by round."""
        return {run["round"]: run[figure] for run in self.runs if run["way"] == key}


def swept(server: VllmServer, count: int, times: int) -> dict[int, list[float]]:
    """Return tokens/s of the HTTP client by how many requests it keeps open."""
    found: dict[int, list[float]] = {at_once: [] for at_once in CONCURRENCY}
    Client(server, max(CONCURRENCY)).run(count)  # first compilations
    for _ in range(times):
        for at_once, rates in found.items():
            rates.append(Client(server, at_once).run(count)["tokens_per_s"])
    return found


def every_way(folder: Path, server: VllmServer, best: int) -> Iterator[tuple[str, Way]]:
    """Yield each way with its key, in the order of the tables."""
    yield "warmq", Warmq(folder)
    yield "run_batch", RunBatch(folder)
    yield "client", Client(server, best)
    yield "one_by_one", Client(server, 1)
    yield "celery", StockCelery(folder, THREADS)
    yield "llmq", Llmq(folder)
    yield "ray", RayData(folder)
    yield "offline", BareEngine(folder, OFFLINE)
    yield "bare", (bare := BareEngine(folder, "final"))
    for kind in MORE_BARE:
        yield f"bare_{kind}", BareEngine(folder, kind, bare)


def measure(quick: bool) -> dict[str, Any]:
    """Run everything; return the part's figures."""
    count, rounds, files, lines = (150, 1, 1, 200) if quick else (500, 5, 10, FILE_LINES)
    field = Field()
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        # This machine stands still for seconds at times: a connection closed then says nothing.
        server = VllmServer(folder / "server.log", *MORE_ARGS, keep_alive_s=300)
        stack.callback(server.kill)
        began = time.monotonic()
        server.start()
        started = time.monotonic() - began
        sweep = swept(server, count, 1 if quick else 2)
        best = max(sweep, key=lambda at_once: statistics.median(sweep[at_once]))
        for key, way in every_way(folder, server, best):
            field.enter(key, way, stack)
        field.start_s |= {"client": started, "one_by_one": started}
        field.start_s |= {f"bare_{kind}": field.start_s["bare"] for kind in MORE_BARE}
        for number in range(rounds):
            field.round(number, count, SELDOM if number % 2 else frozenset())
        file_walls = in_files(field, files, lines)
    return {
        "requests": count, "tokens_each": TOKENS, "engine_args": ENGINE_ARGS,
        "fewer": {"one_by_one": min(count, FEW)},
        "names": {key: way.name for key, way in field.ways.items()},
        "start_s": {key: round(seconds, 1) for key, seconds in field.start_s.items()},
        "not_run": field.not_run, "client_sweep_tokens_per_s": sweep,
        "files": {"lines": lines, "tokens_each": FILE_TOKENS, "number": files},
        "reached": reached(field) | file_walls,
    }  # fmt: skip


def in_files(field: Field, files: int, lines: int) -> dict[str, Any]:
    """Return how long files take one after another, with short answers, and the ratio of sums."""
    warmq, run_batch = field.ways["warmq"], field.ways["run_batch"]
    assert isinstance(warmq, Warmq) and isinstance(run_batch, RunBatch)
    ours, theirs = [], []
    for _ in range(files):
        ours.append(warmq.file(lines, FILE_TOKENS))
        theirs.append(run_batch.run(lines, FILE_TOKENS)["wall_s"])
    return {
        "warmq_file_s": report.spread(ours, 2),
        "run_batch_file_s": report.spread(theirs, 2),
        "run_batch_files_to_warmq": report.spread(
            [their / our for our, their in zip(ours, theirs, strict=True)], 2
        ),
    }


def reached(field: Field) -> dict[str, Any]:
    """Return rates, walls and the ratios of runs of one round."""
    found: dict[str, Any] = {}
    mine = field.values("warmq", "tokens_per_s")
    for key in field.ways:
        rates = field.values(key, "tokens_per_s")
        found[f"{key}_tokens_per_s"] = report.spread(list(rates.values()), 0)
        found[f"{key}_wall_s"] = report.spread(list(field.values(key, "wall_s").values()), 1)
        if key != "warmq":
            ratios = [mine[number] / rate for number, rate in rates.items()]
            found[f"warmq_to_{key}"] = report.spread(ratios)
    return found


def show(data: dict[str, Any]) -> None:
    """Print the figures, and what could not run."""
    report.figures(TITLE, data)
    for name, reason in data["not_run"].items():
        print(f"could not run: {name}: {reason}")
