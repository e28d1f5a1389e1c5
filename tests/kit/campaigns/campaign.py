"""The randomised fault campaign: faults drawn by a seed and done to a queue at work; a verdict.

Of its tenants one fails, one cancels, and every now and then a new one comes with a small batch.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from kit.campaigns import campaign_faults
from kit.campaigns.campaign_report import Report
from kit.campaigns.mutations import BrokenPromise
from kit.commands.support import producer_command, producer_env, write_lines
from kit.protocol.lessee import chat, client_of
from kit.redis_servers.proxy import Proxy
from kit.stacks.stage import Stage
from kit.verdicts.fairness import unfair
from kit.verdicts.observer import Writes, read_writes
from kit.verdicts.owners import ownerless
from kit.verdicts.settled import assert_batch_settled, assert_nothing_left
from kit.verdicts.starvation import Starvation

from contract import naming
from contract.redis import keys
from contract.redis.scripts import SHARED
from demo.stack import ROOT, Worker, eventually

#: What large prompts begin with, in bytes 1 MB.
LARGE = "A text that many questions share. " * 30_000


class Campaign:
    """Keeps workers and a queue going while faults are done to them."""

    simulated = True
    workers_wanted = 3
    #: A queue that long keeps every worker busy through the next fault.
    waiting = 400
    #: Nothing may take longer than this between two signs of progress: it would be a hang.
    hang_s = 90.0
    #: Most progress between two faults.
    step = 180
    #: Who submits; weights and caps change meanwhile.
    tenants = ("alpha", "beta", "gamma", "delta", "fails", "cancels")
    #: How many batches are of a tenant that nobody has seen before.
    late = 0.15
    #: Of each worker's engine.
    slots = 16
    #: What workers drain.
    queues: tuple[str, ...] = (naming.DEFAULT_QUEUE,)
    #: How many batches have a poison.
    poisoned = 0.15
    #: The least and most requests of a batch.
    sizes = (60, 500)
    #: How many batches have large prompts, one in ten.
    large_batches = 0.05

    def __init__(self, on: Stage, seed: int, faults: int, requests: int, root: Path = ROOT) -> None:
        self.on = on
        self.root = root
        self.random = random.Random(seed)
        self.report = Report(seed, "simulated", clock_steps=on.clock is not None)
        self.workers: list[Worker] = []
        #: One of the workers reaches Redis through this.
        self.proxy = Proxy(on.server.port)
        self.behind_proxy: Worker | None = None
        #: Workers that a fault kept from renewing their leases.
        self.paused: list[Worker] = []
        self._faults = faults
        self._requests = requests
        self.failing: dict[str, dict[str, str]] = {}
        self.poisons: set[str] = set()
        self.cancelled: set[str] = set()
        self._late: set[str] = set()
        self.may_compute_again = 0
        #: The queue of each batch.
        self.queue_of: dict[str, str] = {}
        self._starvation = Starvation(on.store, naming.DEFAULT_QUEUE, self.hang_s)

    # -- what faults use ------------------------------------------------------------

    def start_worker(self, **settings: object) -> Worker:
        """Start a worker; these settings are added to those of all."""
        ours: dict[str, object] = {
            "simulated_process": True, "simulated_latency_s": 0.15, "stall_timeout_s": 2,
            "drain_timeout_s": 5,
        }  # fmt: skip
        return self.on.worker(self.root, **(ours | settings))

    def add_worker(self) -> None:
        """Start one more worker, behind the proxy if none is."""
        proxied = self.behind_proxy is None
        worker = self.start_worker(**({"redis_url": self.proxy.url} if proxied else {}))
        if proxied:
            self.behind_proxy = worker
        self.workers.append(worker)

    def replace(self, worker: Worker) -> None:
        """Put a new worker in the place of one that ended."""
        self.workers.remove(worker)
        if worker is self.behind_proxy:
            self.behind_proxy = None
        self.add_worker()

    def mark(self, script: str) -> bytes:
        """Return the SHA of a script as the workers have it, without a guard perhaps."""
        (own,) = self.root.glob(f"*/lua/{script}.lua")
        shared = [self.root / "contract" / "lua" / f"{name}.lua" for name in SHARED]
        text = "\n".join(part.read_text() for part in (*shared, own))
        return client_of(self.on.store).script_load(text).encode()

    def victim(self) -> Worker:
        """Return a worker that has something in flight."""

        def busy() -> Worker | None:
            self.feed()
            found = [w for w in self.workers if self.on.announced(w).get("in_flight", 0)
                     and self.on.announced(w)["state"] == "ready"]  # fmt: skip
            return self.random.choice(found) if found else None

        return eventually(busy, self.hang_s, "a worker at work")

    def feed(self) -> None:
        """Keep the queues filled."""
        for queue in self.queues:
            while sum(self.on.store.queue_lengths(queue).values()) < self.waiting:
                batch_id, bodies = self.new_batch()
                self.queue_of[batch_id] = queue
                self.on.submit(bodies, batch_id, tenant=self.tenant_of(batch_id), queue=queue)

    def model_of(self, batch_id: str) -> str:
        """Return the model that each answer must name; '' if answers name none."""
        return ""

    def tenant_of(self, batch_id: str) -> str:
        """Return whose batch it is."""
        if batch_id in self._late:
            return f"late-{batch_id}"
        return self.tenants[int(batch_id.removeprefix("b")) % len(self.tenants)]

    def engine_parts_now(self, worker: Worker) -> list[psutil.Process]:
        """Return the processes of a worker's engine, EngineCore or its stand-in first; [] if
        they are not all there."""
        return [p for p in psutil.Process(worker.pid).children() if p.name() == "cat"]

    def progress(self) -> int:
        """Return a number that grows with the work done."""
        return self.on.computed().starts.total()

    def new_batch(self) -> tuple[str, list[dict[str, Any]]]:
        """Make up a batch: mostly good requests, some that fail, seldom a poison."""
        batch_id = f"b{self.report.batches}"
        late = self.random.random() < self.late
        if late:
            self._late.add(batch_id)
        count = self.random.randint(5, 40) if late else self.random.randint(*self.sizes)
        fails = self.tenant_of(batch_id) == "fails"
        large = self.random.random() < self.large_batches
        if large:
            count = min(count, 120)
        bodies = [chat(f"{LARGE * (large and n % 10 == 0)}question {n} of {batch_id}")
                  for n in range(count)]  # fmt: skip
        self.report.large_requests += large * len(bodies[::10])
        failing = self.failing[batch_id] = {}
        for n in range(count):
            if self.random.random() < (0.9 if fails else 0.01):
                failing[f"c{n + 1}"] = "request_failed"
                # A long one may well be in flight when its worker is paused.
                after_s = 0.1 if fails else self.random.choice((0.1, 2))
                bodies[n]["user"] = f"simulate:fail={after_s}"
        if self.random.random() < self.poisoned:
            n = self.random.randrange(count)
            bodies[n]["user"], failing[f"c{n + 1}"] = "simulate:die", "poison"
            self.poisons.add(naming.request_id(batch_id, f"c{n + 1}"))
        self.report.poisons += list(failing.values()).count("poison")
        self.report.failing += list(failing.values()).count("request_failed")
        self.report.late_tenants += late
        self.on.bodies[batch_id] = {f"c{n}": body for n, body in enumerate(bodies, 1)}
        self.report.batches += 1
        self.report.requests += count
        return batch_id, bodies

    def submit_command(self, batch_id: str, bodies: list[dict[str, Any]]) -> tuple[list[str], Any]:
        """Return the real command that submits a batch, and its environment."""
        file = self.on.folder / f"{batch_id}.jsonl"
        if not file.exists():
            write_lines(file, ({"custom_id": f"c{n}", "url": "/v1/chat/completions",
                                "method": "POST", "body": body}
                               for n, body in enumerate(bodies, 1)))  # fmt: skip
        tenant = ("--tenant", self.tenant_of(batch_id))
        command = producer_command("submit", file, "--batch-id", batch_id, *tenant)
        return command, producer_env(self.on.server.url)

    def kinds(self) -> dict[str, campaign_faults.Fault]:
        """Return the faults to draw from, by name."""
        return campaign_faults.kinds(simulated=self.simulated, clock=self.on.clock is not None)

    # -- the run --------------------------------------------------------------------

    def run(self, *, look_after_each: bool = False) -> Report:
        """Do all faults, let everything end, and judge.

        Raises:
            BrokenPromise: after the first fault that the observers object to, if they are
                to look after each; it takes long, for they read the whole history.
        """
        began = time.monotonic()
        with self.proxy:
            try:
                self._do_all(look_after_each=look_after_each)
            except (TimeoutError, subprocess.TimeoutExpired):
                self.report.hangs += 1
                raise
            finally:
                self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    def _do_all(self, *, look_after_each: bool) -> None:
        kinds = self.kinds()
        for _ in range(self.workers_wanted):
            self.add_worker()
        deck: list[str] = []
        while self.report.faults.total() < self._faults or self.report.requests < self._requests:
            self.feed()
            self._advance()
            if self.report.faults.total() < self._faults:
                # Drawn like cards, so that each kind has its turn.
                deck = deck or self.random.sample(sorted(kinds), len(kinds))
                kind = deck.pop()
                self.may_compute_again += kinds[kind](self)
                self.report.faults[kind] += 1
                if look_after_each and (seen := self.broken()):
                    raise BrokenPromise(f"after {self.report.faults.total()} faults: {seen}")
        for number in range(self.report.batches):
            self._finish(f"b{number}")
        self._retry_innocents()
        self._await_retirement()
        for worker in self.workers:
            assert worker.stop() == 0, worker.log_path
        self._judge()

    def _advance(self) -> None:
        """Let some more work begin: the next fault's moment."""
        self.look_for_starvation()
        target = self.progress() + self.random.randint(1, self.step)

        def there() -> bool:
            self.feed()  # what waits may be of a batch that was cancelled
            return self.progress() >= target

        eventually(there, self.hang_s, f"progress to {target}")
        self._cancel_one()

    def look_for_starvation(self) -> None:
        """Raise TimeoutError if one waits for ever."""
        self._starvation.look()

    def _cancel_one(self) -> None:
        """Cancel what the tenant that cancels has running, every other time."""
        running = [
            batch for batch in sorted(self.on.store.batches(), key=lambda batch: batch.id)
            if batch.tenant == "cancels" and batch.sealed and not batch.finished
        ]  # fmt: skip
        if running and self.random.random() < 0.5:
            batch = self.random.choice(running)
            self.cancelled.add(batch.id)
            self.report.cancelled += self.on.store.cancel(batch)

    def _finish(self, batch_id: str) -> None:
        last, since = -1, time.monotonic()
        while True:
            batch = self.on.store.batch(batch_id)
            assert batch is not None
            if batch.finished:
                return
            if batch.terminal != last:
                last, since = batch.terminal, time.monotonic()
            if time.monotonic() - since > self.hang_s:
                raise TimeoutError(f"{batch_id} hangs at {last} of {batch.number('total')}")
            time.sleep(0.1)

    def _retry_innocents(self) -> None:
        """Requests that were alone in an engine when somebody else killed it get another go."""
        letters = [(letter["id"], letter["batch_id"]) for letter in self.on.store.dead_letters()
                   if letter["request_id"] not in self.poisons]  # fmt: skip
        self.report.blamed_innocents = len(letters)
        if letters:
            assert self.on.store.retry_dead([number for number, _ in letters]) == len(letters)
        for _, batch_id in letters:
            self._finish(batch_id)

    def _await_retirement(self) -> None:
        """Wait until every batch has got its end; then nothing of them needs an owner."""
        redis = client_of(self.on.store)
        eventually(lambda: not redis.zcard(keys.RETIRING), self.hang_s, "all batches retired")

    # -- the verdict ------------------------------------------------------------------

    def broken(self) -> str:
        """Return what the observers have to object to so far, "" if nothing."""
        writes = read_writes(self.on.server.folder)
        seen = {
            "results changed": len(writes.changed),
            "failures by a worker without the lease": len(writes.usurped),
            "workers robbed of their leases": self.robbed(writes),
            "turns not as they should be": len(self._unfair()),
        }
        return ", ".join(f"{count} {what}" for what, count in seen.items() if count)

    def _unfair(self) -> list[str]:
        found = [
            text for queue in self.queues
            for text in unfair(self.on.server.folder, self.slots, queue)
        ]  # fmt: skip
        if found:
            sys.stderr.write("\n".join(["turns:", *found[:20], ""]))
        return found

    def robbed(self, writes: Writes) -> int:
        """Return how many workers lost leases although nothing kept them from renewing."""
        able = {
            str(w.pid) for w in self.on.workers
            if w not in self.paused and w.process and w.process.poll() != -signal.SIGKILL
        }  # fmt: skip
        return sum(worker.split(".")[-2] in able for worker in writes.swept)

    def _judge(self) -> None:
        report, on = self.report, self.on
        logs = [w.log_path.read_text() for w in on.workers]
        report.engine_deaths = sum(log.count("MainProcess] engine died:") for log in logs)
        for batch_id, failing in self.failing.items():
            assert_batch_settled(on.store, batch_id, on.bodies[batch_id], failed=failing,
                                 simulated=self.simulated, model=self.model_of(batch_id),
                                 cancelled=batch_id in self.cancelled)  # fmt: skip
        ids = {rid for batch_id in self.failing for rid in on.ids(batch_id)}
        writes = read_writes(on.server.folder)
        report.commits = sum(writes.commits.values())
        report.deliveries = sum(writes.leased.values())
        report.robbed = self.robbed(writes)
        report.unfair = len(self._unfair())
        report.lost = sum(raw is None for raw in on.store.results(list(ids)))
        report.committed_twice = len(writes.changed)
        assert writes.changed == []
        assert writes.usurped == []
        assert set(writes.commits) == ids
        assert report.commits == len(ids) + report.blamed_innocents
        report.orphan_keys = len(ownerless(client_of(on.store)))
        assert_nothing_left(on.store, queues=self.queues)
        if self.simulated:
            computed = on.computed()
            report.computations, report.computed_again = computed.starts.total(), computed.again
            assert computed.again <= self.may_compute_again + 16 * report.engine_deaths
