"""The upgrade drill: queues that the previous release filled and half drained, drained by both."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kit.commands.support import producer_command, producer_env, write_lines
from kit.protocol.lessee import celery_message, chat, client_of
from kit.stacks.previous import Previous, worker_keys
from kit.stacks.stage import Stage
from kit.verdicts.observer import read_writes
from kit.verdicts.settled import assert_batch_settled, assert_nothing_left

from contract import naming
from contract.redis import keys
from demo.stack import Worker, eventually

#: Nothing may take longer than this between two signs of progress: it would be a hang.
HANG_S = 60.0
OLD, NEW = "previous", "this"
THE = {OLD: "the previous", NEW: "this"}


@dataclass
class Report:
    """What a drill did and found."""

    seed: int
    requests: int = 0
    #: Batches by who queued them, and requests that a plain Celery client sent.
    batches: Counter[str] = field(default_factory=Counter)
    plain: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    #: Computations by release; more than the requests where a worker was killed or paused.
    computations: Counter[str] = field(default_factory=Counter)
    #: How many were begun by each release while workers of both served the queue.
    while_both_served: Counter[str] = field(default_factory=Counter)
    deliveries: int = 0
    commits: int = 0
    lost: int = 0
    committed_twice: int = 0
    seconds: float = 0

    def text(self) -> str:
        """Return it as JSON for people."""
        return json.dumps(vars(self), indent=2, sort_keys=True)


class UpgradeDrill:
    """Fills queues by both releases, and drains them by the old, by both and by the new."""

    def __init__(
        self, on: Stage, previous: Previous, seed: int, requests: int, faults: int,
        choices: Sequence[int] = (1,),
    ) -> None:  # fmt: skip
        """Prepare; a request asks for as many answers as one of `choices`."""
        self.on = on
        self.previous = previous
        self.random = random.Random(seed)
        self.report = Report(seed)
        self._requests, self._faults, self._choices = requests, faults, choices
        self.failing: dict[str, dict[str, str]] = {}
        self.plain: set[str] = set()
        self.serving: dict[str, list[Worker]] = {OLD: [], NEW: []}
        self.pids: dict[int, str] = {}

    # -- who queues and who serves ------------------------------------------------------

    def add_worker(self, release: str) -> Worker:
        """Start one more worker of a release, ready when this returns."""
        make = self.previous.worker if release == OLD else None
        worker = self.on.worker(
            make=make, simulated_process=True, simulated_latency_s=0.12, drain_timeout_s=5
        )
        self.serving[release].append(worker)
        self.pids[worker.pid] = release
        self.on.ready(worker)
        return worker

    def submit(self, release: str, poison: int = 0, sleepers: int = 0) -> str:
        """Queue a batch by a release's own command; return its id.

        Request `poison` (from 1; 0: none) kills its engine; so many from the 20th on take 8 s.
        """
        batch_id = f"{release}-{self.report.batches.total()}"
        count = self.random.randint(150, 400)
        bodies = [chat(f"question {n} of {batch_id}") for n in range(count)]
        failing = self.failing[batch_id] = {}
        for n in range(count):
            if len(self._choices) > 1:
                bodies[n]["n"] = self.random.choice(self._choices)
            if self.random.random() < 0.01:
                bodies[n]["user"], failing[f"c{n + 1}"] = "simulate:fail=0.1", "request_failed"
        for body in bodies[20 : 20 + sleepers]:
            body["user"] = "simulate:sleep=8"
            failing.pop(f"c{bodies.index(body) + 1}", None)
        if poison:
            bodies[poison - 1]["user"], failing[f"c{poison}"] = "simulate:die", "poison"
        self.on.bodies[batch_id] = {f"c{n}": body for n, body in enumerate(bodies, 1)}
        lines = ({"custom_id": c, "url": "/v1/chat/completions", "method": "POST", "body": body}
                 for c, body in self.on.bodies[batch_id].items())  # fmt: skip
        file = write_lines(self.on.folder / f"{batch_id}.jsonl", lines)
        args = ("submit", file, "--batch-id", batch_id)
        old, url = self.previous, self.on.server.url
        command = old.command(*args) if release == OLD else producer_command(*args)
        env = old.env(url) if release == OLD else producer_env(url)
        done = subprocess.run(
            command, env=env, cwd=old.folder, capture_output=True, timeout=50, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        self.report.batches[release] += 1
        self.report.requests += count
        return batch_id

    def send_plain(self, count: int) -> None:
        """Queue requests as a Celery client does, with a header that neither release knows."""
        ids = [f"plain-{len(self.plain) + n}" for n in range(count)]
        client = client_of(self.on.store)
        client.lpush(naming.DEFAULT_QUEUE, *(celery_message(rid, later={"v": 9}) for rid in ids))
        self.plain.update(ids)
        self.report.plain += count
        self.report.requests += count

    # -- the run ------------------------------------------------------------------------

    def run(self) -> Report:
        """Drain by the old, by both, by the new; judge.

        Raises:
            AssertionError: a request was lost or doubled, or something is left behind.
            TimeoutError: nothing moves any more.
        """
        began = time.monotonic()
        self._by_the_old()
        self._by_both()
        self._by_the_new()
        self.report.seconds = round(time.monotonic() - began, 1)
        self._judge()
        return self.report

    def _by_the_old(self) -> None:
        """Half drained, and then one worker dies with its leases."""
        for _ in range(3):
            self.add_worker(OLD)
        first = self.submit(OLD)
        self.send_plain(40)
        while self.report.requests < self._requests * 0.3:
            self.submit(OLD)
        self.on.running(len(self.on.bodies[first]) // 2)
        self._kill(OLD, replace=False)

    def _by_both(self) -> None:
        for _ in range(2):
            self.add_worker(NEW)
        before = self._begun()
        deck: list[tuple[str, str]] = []
        while self.report.requests < self._requests or self.report.faults.total() < self._faults:
            if self._waiting() < 600 and self.report.requests < self._requests:
                self.submit(self.random.choice((OLD, NEW)))
                self.send_plain(self.random.randint(1, 40))
            self._advance()
            if self.report.faults.total() < self._faults:
                kinds = [(what, release) for what in ("kill", "pause", "stop")
                         for release in (OLD, NEW)]  # fmt: skip
                deck = deck or self.random.sample(kinds, len(kinds))
                what, release = deck.pop()
                getattr(self, f"_{what}")(release)
                self.report.faults[f"{what} a worker of {THE[release]} release"] += 1
        self.report.while_both_served = self._begun() - before

    def _by_the_new(self) -> None:
        """The rest, with what the old ones hand back at their end and at their death."""
        assert self.serving[OLD][0].stop() == 0, self.serving[OLD][0].log_path
        for worker in self.serving[OLD][1:]:
            self.on.kill(worker)
        for batch_id in self.failing:
            self._finish(batch_id)
        eventually(lambda: not self._missing(), HANG_S, "all plain requests are answered")
        eventually(lambda: not self._retiring(), HANG_S, "all batches are retired")
        eventually(lambda: not self._counted(), HANG_S, "nothing is counted as in flight")
        for worker in self.serving[NEW]:
            assert worker.stop() == 0, worker.log_path

    def _advance(self) -> None:
        target = self.on.computed().starts.total() + self.random.randint(1, 150)
        eventually(
            lambda: self.on.computed().starts.total() >= target or not self._waiting(),
            HANG_S, f"progress to {target}",
        )  # fmt: skip

    def _finish(self, batch_id: str) -> None:
        last, since = -1, time.monotonic()
        while not (batch := self.on.store.batch(batch_id)) or not batch.finished:
            assert batch is not None, batch_id
            if batch.terminal != last:
                last, since = batch.terminal, time.monotonic()
            if time.monotonic() - since > HANG_S:
                raise TimeoutError(f"{batch_id} hangs at {last} of {batch.number('total')}")
            time.sleep(0.1)

    def _waiting(self) -> int:
        return sum(self.on.store.queue_lengths(naming.DEFAULT_QUEUE).values())

    def _begun(self) -> Counter[str]:
        found = self.on.computed().pids.values()
        return Counter(self.pids[pid] for pids in found for pid in pids)

    def _missing(self) -> list[str]:
        ids = sorted(self.plain)
        return [rid for rid, raw in zip(ids, self.on.store.results(ids), strict=True) if not raw]

    def _retiring(self) -> int:
        return int(client_of(self.on.store).zcard(keys.RETIRING))

    def _counted(self) -> list[bytes]:
        """Return what of the requests of many sequences is counted although none runs."""
        client = client_of(self.on.store)
        turns = client.hgetall(naming.turns_key(naming.DEFAULT_QUEUE))
        held = [name for name, n in turns.items() if name.startswith(b"in_flight:") and int(n)]
        return held + client.hkeys(keys.SEQUENCES)

    # -- faults -------------------------------------------------------------------------

    def _victim(self, release: str) -> Worker:
        return self.random.choice(self.serving[release])

    def _kill(self, release: str, *, replace: bool = True) -> None:
        victim = self._victim(release)
        self.on.kill_group(victim)
        self._replace(release, victim, replace=replace)

    def _stop(self, release: str) -> None:
        victim = self._victim(release)
        assert victim.stop() == 0, victim.log_path
        self._replace(release, victim)

    def _replace(self, release: str, victim: Worker, *, replace: bool = True) -> None:
        self.serving[release].remove(victim)
        if replace:
            self.add_worker(release)

    def _pause(self, release: str) -> None:
        """Stop a worker until what it holds was given to others; then it goes on."""
        victim = self._victim(release)
        os.kill(victim.pid, signal.SIGSTOP)
        client = client_of(self.on.store)
        held = [key for key in worker_keys(client) if f".{victim.pid}.".encode() in key]
        try:
            eventually(lambda: not client.exists(*held) if held else True, HANG_S, "swept")
        finally:
            os.kill(victim.pid, signal.SIGCONT)

    # -- the verdict --------------------------------------------------------------------

    def _judge(self) -> None:
        on, report = self.on, self.report
        for batch_id, failing in self.failing.items():
            assert_batch_settled(on.store, batch_id, on.bodies[batch_id], failed=failing)
        ids = {rid for batch_id in self.failing for rid in on.ids(batch_id)} | self.plain
        writes = read_writes(on.server.folder)
        report.commits, report.deliveries = (
            sum(writes.commits.values()),
            sum(writes.leased.values()),
        )
        report.computations = self._begun()
        report.lost = sum(raw is None for raw in on.store.results(list(ids)))
        report.committed_twice = len(writes.changed)
        assert (report.lost, writes.changed, writes.usurped) == (0, [], [])
        assert set(writes.commits) == ids
        assert report.commits == len(ids) == report.requests
        assert not [key for key in worker_keys(client_of(on.store)) if b":celery@" in key]
        assert_nothing_left(on.store)
        assert not list(on.store.dead_letters())
