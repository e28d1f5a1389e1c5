"""What it costs a worker to be looked at: /metrics scraped, Celery's task events read.

Each way and none at all in turns, on one machine within minutes: requests/s at the ceiling (an
engine without latency), and the worker's CPU a request at about 1,200 requests/s.
"""

from __future__ import annotations

import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis
from bench.common import report
from bench.common.load import cpu_s, hold, wait_ready

from demo.stack import RedisServer, Worker, eventually, free_port

SLOTS, LATENCY_S = 256, 0.2
FIRST = 1500
#: Prometheus' own default is a minute; 15 s is usual.
SCRAPE_S = 5.0
TITLE = "a worker that is looked at ÷ one that is not"
EXPECTED = {
    "written": "before the first run: a page takes 10 ms of a core, an event 20 us and at most "
    "100 requests a second are told (since then 50)",
    "metrics_ceiling": 0.997,
    "metrics_cpu": 1.01,
    "events_ceiling": 0.98,
    "events_cpu": 1.03,
}
BARS = {
    "metrics_ceiling": 0.98, "metrics_steady": 0.98, "metrics_cpu": 1.02,
    "events_ceiling": 0.98, "events_cpu": 1.05,
}  # fmt: skip


class Telling(Worker):
    """A worker that is started with `-E`."""

    def command(self) -> list[str]:
        """Return the Procfile's, and the option."""
        return [*super().command(), "-E"]


@contextmanager
def beside(target: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run something in a thread while the context is open."""
    over = threading.Event()
    thread = threading.Thread(target=target, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def scrape(port: int, over: threading.Event) -> None:
    """Read the page as Prometheus does."""
    while not over.wait(SCRAPE_S):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()


def listen(url: str, over: threading.Event) -> None:
    """Receive all of Celery's events, and throw them away."""
    with redis.Redis.from_url(url) as client, client.pubsub() as heard:
        heard.psubscribe("/*.celeryev/*")
        while not over.is_set():
            heard.get_message(timeout=0.2)


def once(folder: Path, way: str, latency_s: float, count: int) -> dict[str, float]:
    """Return requests/s and the worker's CPU microseconds a request of one run."""
    settings: dict[str, Any] = {"simulated_slots": SLOTS, "simulated_latency_s": latency_s}
    looked: Callable[[threading.Event], None] = threading.Event.wait  # nobody looks
    with RedisServer(folder) as server, server.client() as client:
        kind = Worker
        if way == "metrics":
            settings["metrics_port"] = free_port()
            looked = partial(scrape, settings["metrics_port"])
        if way == "events":
            kind, looked = Telling, partial(listen, server.url)
        with kind(server.url, folder / "log", engine="simulated", **settings) as worker:
            wait_ready(client)
            # The first thousand requests are told of at once, and never again in the worker's life.
            first = hold(client, "first", FIRST)
            first.release()
            first.wait()
            held = hold(client, "observed", count)
            with beside(looked):
                if way == "events":
                    eventually(client.pubsub_numpat, 10, "somebody listens")
                cpu, began = cpu_s(worker.pid), held.release()
                ended = held.wait()
                cpu = cpu_s(worker.pid) - cpu
    return {"per_s": count / (ended - began), "us": 1e6 * cpu / count}


#: The second `none` says how far two runs lie apart that nobody looks at.
WAYS = ("none", "none again", "metrics", "events")


#: Runs at the ceiling lie up to a third apart, so that there are more of them.
CEILING_ROUNDS, STEADY_ROUNDS = 12, 8


def measure(quick: bool) -> dict[str, Any]:
    """Run all ways in turns, another first in each round; return the part's figures."""
    ceiling, steady = (20_000, 5_000) if quick else (60_000, 12_000)
    runs: dict[str, dict[str, list[float]]] = {
        way: {"per_s": [], "us": [], "steady_per_s": []} for way in WAYS
    }
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        for n, way in _in_turn(2 if quick else CEILING_ROUNDS):
            found = once(Path(name) / f"ceiling-{n}-{way}", way, 0, ceiling)
            runs[way]["per_s"].append(found["per_s"])
        for n, way in _in_turn(2 if quick else STEADY_ROUNDS):
            found = once(Path(name) / f"steady-{n}-{way}", way, LATENCY_S, steady)
            runs[way]["us"].append(found["us"])
            runs[way]["steady_per_s"].append(found["per_s"])
    return figures(runs)


def _in_turn(rounds: int) -> Iterator[tuple[int, str]]:
    for n in range(rounds):
        for way in report.in_turn(WAYS, n):
            yield n, way


def figures(runs: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return the ratios of pairs that ran next to each other."""
    reached = {}
    for way in WAYS[1:]:
        name = way.replace(" ", "_")
        reached[f"{name}_ceiling"] = _ratio(runs, way, "per_s")
        reached[f"{name}_steady"] = _ratio(runs, way, "steady_per_s")
        reached[f"{name}_cpu"] = _ratio(runs, way, "us")
    return {"reached": reached}


def _ratio(runs: dict[str, dict[str, list[float]]], way: str, figure: str) -> dict[str, Any]:
    pairs = zip(runs[way][figure], runs["none"][figure], strict=True)
    return report.spread([one / none for one, none in pairs], 3)
