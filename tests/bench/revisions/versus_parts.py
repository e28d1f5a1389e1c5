"""The parts of versus.py: what one run of each does with one side's worker and producer.

Nothing here knows the product's classes: a batch is queued by the side's own `producer submit`,
and Redis is asked only for what docs/explanation/architecture.md names.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
import redis
from bench.common.load import HELD, cpu_s
from bench.openai_servers import canned
from bench.producer_cost.submission import timed, write_file
from bench.worker_cost.overhead import LATENCY_S, STEP_S

from contract import naming
from contract.redis import keys
from demo.stack import RedisServer, Worker, eventually, free_port

BATCH = "versus"
SLOTS = 256
#: Eight seconds of work at 1,280 requests a second.
PACED = int(SLOTS / LATENCY_S * 8)
CEILING = 100_000
STREAMED = 30_000
LINES = 200_000
PACKAGES = ("contract", "producer", "worker")
#: Prints where a process finds each of them.
ORIGINS = (
    "import contract, producer, worker\n"
    "for package in (contract, producer, worker):\n"
    "    print(package.__path__[0])\n"
)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that are compared: the folder whose packages run."""

    name: str
    root: Path

    @property
    def env(self) -> dict[str, str]:
        """What makes Python take this side's packages."""
        return {"PYTHONPATH": str(self.root)}

    def prepare(self) -> None:
        """Compile its modules, and make sure that they are what a process of this side imports."""
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", *PACKAGES], cwd=self.root, check=True
        )
        told = subprocess.run(
            [sys.executable, "-P", "-c", ORIGINS], env=self.env, capture_output=True, text=True,
            check=True,
        ).stdout.splitlines()  # fmt: skip
        wanted = [str(self.root / package) for package in PACKAGES]
        assert told == wanted, f"{self.name} would run {told}"

    def produce(self, url: str, *words: str | Path) -> float:
        """Run its `producer`; return wall seconds."""
        # Not the installed script: it names a module that not every revision has.
        command = [sys.executable, "-P", "-m", "producer", *map(str, words)]
        return timed(command, url, env=self.env)["wall_s"]

    def worker(self, url: str, log: Path, **settings: object) -> Worker:
        """Return its worker, with the simulated engine if no other is named."""
        known = {"engine": "simulated", "simulated_slots": SLOTS}
        used = settings if "engine" in settings else known | settings
        return Worker(url, log, root=self.root, env=self.env, **used)


Run = Callable[[Side], dict[str, float]]


def drained(side: Side, url: str, lines: Path, log: Path, **engine: object) -> dict[str, float]:
    """Queue a file, let a worker that is ready have it all at once; return the worker's figures."""
    with redis.Redis.from_url(url) as client:
        side.produce(url, "submit", lines, "--batch-id", BATCH)
        # Whose turn it is, or in revisions without turns the messages themselves.
        steps = naming.PRIORITY_STEPS
        places = [naming.turns_key(naming.DEFAULT_QUEUE, step) for step in steps]
        places += naming.priority_lists(naming.DEFAULT_QUEUE)
        queue = next(key for key in places if client.exists(key))
        client.rename(queue, HELD)
        count = int(client.hget(keys.batch_key(BATCH), "total"))
        with side.worker(url, log, **engine) as worker:
            eventually(lambda: is_ready(client), 60, "the worker is ready")
            cpu, began = cpu_s(worker.pid), now(client)
            client.rename(HELD, queue)
            ended = eventually(lambda: finished_at(client), 300, "the batch ends", 0.05)
            cpu = cpu_s(worker.pid) - cpu
    return {"requests_per_s": count / (ended - began), "worker_us_per_request": 1e6 * cpu / count}


def is_ready(client: redis.Redis) -> bool:
    """Whether a worker says that its engine is ready."""
    told = (value.split(b"\0", 1)[1] for value in client.hvals(keys.WORKERS))
    return any(orjson.loads(state)["state"] == "ready" for state in told)


def now(client: redis.Redis) -> float:
    """Return Redis' time in seconds."""
    seconds, micros = client.time()
    return float(seconds) + micros / 1e6


def finished_at(client: redis.Redis) -> float:
    """Return Redis' time in seconds when the last result was committed; 0 before."""
    return int(client.hget(keys.batch_key(BATCH), "finished_at") or 0) / 1000


@contextmanager
def workers(folder: Path, count: int, **engine: object) -> Iterator[Run]:
    """Yield a run of one side's worker over `count` requests, with a Redis of its own."""
    lines = folder / "in.jsonl"
    write_file(lines, count)
    numbers = itertools.count()

    def run(side: Side) -> dict[str, float]:
        own = folder / str(next(numbers))
        with RedisServer(own) as server:
            return drained(side, server.url, lines, own / "worker.log", **engine)

    yield run


def n256(folder: Path, _sides: Sequence[Side]) -> AbstractContextManager[Run]:
    """Run 256 slots at 200 ms a request, in steps of 10 ms."""
    engine = {"simulated_latency_s": LATENCY_S, "simulated_step_s": STEP_S}
    return workers(folder, PACED, **engine)


def ceiling(folder: Path, _sides: Sequence[Side]) -> AbstractContextManager[Run]:
    """Run an engine without latency."""
    return workers(folder, CEILING, simulated_latency_s=0)


@contextmanager
def openai(folder: Path, _sides: Sequence[Side]) -> Iterator[Run]:
    """Run the openai engine, 256 in flight, before a server whose answers are written before."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-P", canned.__file__, str(port)])
    engine = {
        "engine": "openai", "openai_base_urls": f"http://127.0.0.1:{port}/v1",
        "openai_concurrency": SLOTS,
    }  # fmt: skip
    try:
        with workers(folder, STREAMED, **engine) as run:

            def counted(side: Side) -> dict[str, float]:
                found = run(side)
                return found | {"tokens_per_s": found["requests_per_s"] * canned.TOKENS}

            yield counted
    finally:
        server.kill()
        server.wait()


@contextmanager
def submit(folder: Path, _sides: Sequence[Side]) -> Iterator[Run]:
    """Submit a file to an empty Redis that no worker drains."""
    lines = folder / "in.jsonl"
    write_file(lines, LINES)
    numbers = itertools.count()

    def run(side: Side) -> dict[str, float]:
        with RedisServer(folder / str(next(numbers))) as server:
            wall_s = side.produce(server.url, "submit", lines, "--batch-id", BATCH)
        return {"lines_per_s": LINES / wall_s}

    yield run


@contextmanager
def results(folder: Path, sides: Sequence[Side]) -> Iterator[Run]:
    """Collect a batch that the same side has answered before, again and again."""
    lines, out = folder / "in.jsonl", folder / "out.jsonl"
    write_file(lines, LINES)
    with ExitStack() as stack:
        urls = {}
        for number, side in enumerate(sides):
            own = folder / str(number)
            urls[side] = stack.enter_context(RedisServer(own)).url
            drained(side, urls[side], lines, own / "worker.log", simulated_latency_s=0)

        def run(side: Side) -> dict[str, float]:
            out.unlink(missing_ok=True)  # the other side's, which is not this batch's to replace
            wall_s = side.produce(urls[side], "results", BATCH, "-o", out)
            with out.open("rb") as file:
                assert sum(1 for _ in file) == LINES
            return {"lines_per_s": LINES / wall_s}

        yield run


PARTS = {
    "n256": n256, "ceiling": ceiling, "openai": openai, "submit": submit, "results": results,
}  # fmt: skip
