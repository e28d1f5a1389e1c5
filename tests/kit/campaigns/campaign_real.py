"""The campaign with vLLM: fewer faults and requests, and processes that must not stay behind."""

from __future__ import annotations

from typing import Any

import orjson
import psutil
from kit.campaigns.campaign import Campaign
from kit.campaigns.campaign_faults import HELD, Fault
from kit.protocol import script_keys
from kit.protocol.lessee import chat, client_of
from kit.stacks.stage import Stage

from contract.redis import keys
from demo.stack import Worker, eventually


class RealCampaign(Campaign):
    """Two workers with vLLM and the shipped model."""

    simulated = False
    workers_wanted = 2
    waiting = 60
    slots = 32
    hang_s = 240.0
    step = 40

    def __init__(self, on: Stage, seed: int, faults: int, requests: int) -> None:
        super().__init__(on, seed, faults, requests)
        self.report.engine = "vllm"
        self.seen: set[psutil.Process] = set()

    def start_worker(self, **settings: object) -> Worker:
        """Start a worker; these settings are added to those of all."""
        return self.on.real_worker(drain_timeout_s=10, **settings)

    def victim(self) -> Worker:
        """Return a worker that has something in flight; remember its engine's processes."""
        worker = super().victim()
        self.seen.update(psutil.Process(worker.pid).children(recursive=True))
        return worker

    def engine_parts_now(self, worker: Worker) -> list[psutil.Process]:
        """Return EngineCore and its workers; a rebuilt engine may not have them all yet."""
        titles = ("VLLM::EngineCore", "VLLM::Worker")
        titled = [(_title(p), p) for p in psutil.Process(worker.pid).children(recursive=True)]
        found = [p for title in titles for name, p in titled if name.startswith(title)]
        return found if len(found) >= len(titles) else []

    def progress(self) -> int:
        """Return how many requests have ended."""
        batches = (self.on.store.batch(f"b{n}") for n in range(self.report.batches))
        return sum(batch.terminal for batch in batches if batch is not None)

    def new_batch(self) -> tuple[str, list[dict[str, Any]]]:
        """Make up a batch of answers of some length."""
        batch_id = f"b{self.report.batches}"
        count = self.random.randint(30, 90)
        bodies = [chat(f"Count to {n}", max_tokens=self.random.randint(20, 250), ignore_eos=True)
                  for n in range(count)]  # fmt: skip
        self.failing[batch_id] = {}
        self.on.bodies[batch_id] = {f"c{n}": body for n, body in enumerate(bodies, 1)}
        self.report.batches += 1
        self.report.requests += count
        return batch_id, bodies

    def _judge(self) -> None:
        super()._judge()

        def left() -> list[psutil.Process]:
            return [p for p in self.seen if p.is_running() and p.status() != "zombie"]

        eventually(lambda: not left(), 15, "no engine process stays", 0.1)


class SharedCampaign(RealCampaign):
    """The same with two front ends a worker, which are killed too."""

    def __init__(self, on: Stage, seed: int, faults: int, requests: int) -> None:
        super().__init__(on, seed, faults, requests)
        self.report.engine = "vllm-front-ends"

    def start_worker(self, **settings: object) -> Worker:
        """Start a worker with two front ends; these settings are added to those of all."""
        return super().start_worker(front_ends=2, **settings)

    def kinds(self) -> dict[str, Fault]:
        """Return the faults by name."""
        return super().kinds() | {"kill_front_end": kill_front_end}


def kill_front_end(c: Campaign) -> int:
    """SIGKILL of a front end with requests in flight; another takes its place."""

    def working() -> list[psutil.Process]:
        return [each for each in front_ends(c.victim()) if holds_leases(c.on, each)]

    eventually(working, c.hang_s, "a front end at work")[0].kill()
    return HELD


def front_ends(worker: Worker) -> list[psutil.Process]:
    """Return a worker's further front ends."""
    return [
        each for each in psutil.Process(worker.pid).children()
        if any("front_end" in word for word in _command(each))
    ]  # fmt: skip


def holds_leases(on: Stage, front_end: psutil.Process) -> bool:
    """Whether a front end has requests in flight."""
    names = client_of(on.store).scan_iter(script_keys.worker_key("*"))
    return any(name.split(b".")[-2] == str(front_end.pid).encode() for name in names)


def completed_by(on: Stage, front_end: psutil.Process) -> int:
    """Return how many requests a front end has completed, by its latest announcement."""
    records = client_of(on.store).hgetall(keys.WORKERS)
    own = [orjson.loads(record.partition(b"\0")[2]) for name, record in records.items()
           if name.split(b".")[-2] == str(front_end.pid).encode()]  # fmt: skip
    return sum(each["done"]["completed"] for each in own)


def _title(process: psutil.Process) -> str:
    """Return a process's title, "" if it has ended."""
    return (_command(process) or [""])[0]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
