"""Two gateways and their carriers, killed at random moments while clients use them; a verdict.

Meanwhile their connections to Redis are reset at random moments (gateway_resets.py).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import openai
import orjson
from kit.campaigns.gateway_clients import MODEL, Asked, Client, Gateways
from kit.campaigns.gateway_phases import OF_CARRIER, PHASES, carriers, phases_of
from kit.campaigns.gateway_report import GatewayReport
from kit.campaigns.gateway_resets import Resets
from kit.commands.support import run_producer
from kit.gateways.gateway_process import GatewayProcess
from kit.protocol.lessee import client_of
from kit.redis_servers.proxy import Proxy
from kit.servers.webhook_receiver import Receiver
from kit.stacks.celery_side import simulated
from kit.verdicts.observer import WATCHED, EngineLog

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, _answers, eventually

T = TypeVar("T")
#: From when a phase is seen to the kill, at most: about as long as the phase lasts.
SPAN_S = {
    "upload": 0.2, "webhook": 0.25, "online": 0.15, "looking": 0.01, "submitting": 0.1,
    "writing": 0.02, "waiting": 1.0,
}  # fmt: skip
#: How often a process may have left a phase before it was stopped.
TRIES = 200
#: Nothing may keep the campaign waiting for longer: it would be a hang.
HANG_S = 120.0


class GatewayCampaign:
    """Redis, two workers, two gateways on one folder, a receiver of webhooks, and clients."""

    def __init__(
        self, folder: Path, seed: int, kills: int, redis_kills: int, most_lines: int
    ) -> None:
        self.folder, self.report = folder, GatewayReport(seed)
        self.random = random.Random(seed)
        self.redis = RedisServer(folder / "redis", *WATCHED, "--appendfsync", "always")
        self.engine_log = EngineLog(folder / "engine.log")
        self.files = folder.resolve() / "files"
        #: When something was killed, in ms since 1970, as Redis counts.
        self.killed_at: list[float] = []
        #: From when to when Redis was away, in the same way.
        self.outages: list[tuple[float, float]] = []
        self.asked: list[Asked] = []
        self._by_file: dict[str, str] = {}
        self._kills, self._redis_kills, self._most = kills, redis_kills, most_lines
        self._enough = threading.Event()
        self._failed: list[BaseException] = []

    def run(self, judge: Callable[[GatewayCampaign], None]) -> GatewayReport:
        """Do all kills, let everything end, and have it judged while all is still there."""
        began = time.monotonic()
        with ExitStack() as stack:
            self._start(stack)
            clients = [Client(self.clients, f"c{n}", self.report.seed, self._most)
                       for n in range(7)]  # fmt: skip
            threads = [
                threading.Thread(target=self._use, args=(client, n >= 5), daemon=True)
                for n, client in enumerate(clients)
            ]
            for thread in threads:
                thread.start()
            try:
                with self.resets:
                    self._kill_all()
            finally:
                self._enough.set()
                for thread in threads:
                    thread.join(2 * HANG_S)
            if self._failed:
                raise self._failed[0]
            assert not any(thread.is_alive() for thread in threads), "a client hangs"
            self.asked = [asked for client in clients for asked in client.made]
            self.report.online = sum(client.answered for client in clients)
            self.report.told_meanwhile = self.clients.refused
            self.report.resets = self.resets.done
            judge(self)
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    def ask(self, what: Callable[[openai.OpenAI], T]) -> T:
        """Ask whichever gateway answers."""
        return self.clients.persistently(what)

    def blame(self, what: str, found: object) -> None:
        """Tell what was found, for whoever looks into it."""
        sys.stderr.write(f"{what}: {str(found)[:4000]}\n")

    # -- what there is ------------------------------------------------------------------------

    def _start(self, stack: ExitStack) -> None:
        url = stack.enter_context(self.redis).url
        self.store = BatchStore.open(url, "campaign", ttl_ms=3_600_000)
        stack.callback(self.store.close)
        for n in range(2):
            stack.enter_context(simulated(
                url, self.folder / f"worker-{n}.log", served_model_name=MODEL,
                simulated_latency_s=0.05, simulated_log=self.folder / "engine.log",
            ))  # fmt: skip
        eventually(lambda: len(self.store.announcements()) == 2, 60, "the workers are there")
        self.receiver = stack.enter_context(Receiver(stays=0.3))
        made = run_producer("webhooks", "create", "--url", self.receiver.url, redis_url=url)
        self.secret = made.stdout.strip()
        proxy = stack.enter_context(Proxy(self.redis.port))
        self.resets = Resets(proxy, self.report.seed)
        self.gateways = [
            GatewayProcess(proxy.url, self.folder, gateway_private_webhooks=True) for _ in range(2)
        ]
        for gateway in self.gateways:
            stack.callback(gateway.kill)
            gateway.start()
        self.clients = Gateways([gateway.url for gateway in self.gateways])
        stack.callback(self.clients.close)

    def _use(self, client: Client, online: bool) -> None:
        try:
            while not self._enough.is_set():
                if online:
                    client.online()
                else:
                    client.batch(self._note)
        except BaseException as error:
            self._failed.append(error)
            self._enough.set()

    def _note(self, asked: Asked) -> None:
        self._by_file[asked.file_id] = asked.id

    # -- kills ----------------------------------------------------------------------------------

    def _kill_all(self) -> None:
        # Drawn like cards, so that each phase has its turn.
        drawn: list[str] = []
        while len(drawn) < self._kills:
            drawn += self.random.sample(PHASES, len(PHASES))
        plan = drawn[: self._kills]
        for _ in range(self._redis_kills):
            plan.insert(self.random.randrange(1, len(plan) + 1), "redis")
        for what in plan:
            if self._enough.is_set():
                return
            self._kill_redis() if what == "redis" else self._kill_in(what)

    def _kill_redis(self) -> None:
        time.sleep(self.random.uniform(0, 1))  # the fault's moment, at random
        self.redis.stop(signal.SIGKILL)
        self._killed("redis")
        self.redis.start(wait=False)
        with self.redis.client() as client:  # a long append-only file takes some time
            eventually(lambda: _answers(client), HANG_S, "Redis is back")
        self.outages.append((self.killed_at[-1], time.time() * 1000))

    def _killed(self, what: str) -> None:
        self.killed_at.append(time.time() * 1000)
        self.report.kills[what] += 1

    def _kill_in(self, phase: str) -> None:
        # Who takes over must live: each carrier that was killed is started again by its gateway.
        eventually(lambda: all(map(carriers, self.gateways)), HANG_S, "both carriers live")

        def there() -> GatewayProcess | None:
            if self._failed:
                raise self._failed[0]
            at = [g for g in self.gateways if phase in self._phases(g)]
            return self.random.choice(at) if at else None

        for _ in range(TRIES):
            victim = eventually(there, HANG_S, f"a gateway at {phase}", every_s=0.002)
            time.sleep(self.random.uniform(0, SPAN_S[phase]))  # the fault's moment, at random
            if self._strike(victim, phase):
                return
        raise TimeoutError(f"no gateway stays at {phase}")

    def _strike(self, victim: GatewayProcess, phase: str) -> bool:
        """Stop a gateway, and see what it is at: kill it, its carrier or both if that is `phase`.

        It goes on, and False is returned, if it has left that phase.
        """
        assert victim.process is not None
        whole, carrying = victim.process.pid, carriers(victim)
        for pid in (whole, *carrying):
            os.kill(pid, signal.SIGSTOP)
        found, killed = self._phases(victim), list[int]()
        if phase in found:
            of_carrier = phase in OF_CARRIER or (phase == "waiting" and self.random.random() < 0.5)
            both = self.random.random() < 0.5
            killed = [whole, *carrying] if both else carrying if of_carrier else [whole]
            self._killed("both" if both else "carrier" if of_carrier else "gateway")
            for name, pid in found.items():  # a gateway alone may die while its carrier waits
                self.report.phases[name] += name == phase or pid in killed
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        for pid in {whole, *carrying} - set(killed):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if whole in killed:
            victim.process.wait()
            time.sleep(self.random.uniform(0, 2))  # the moment of its restart, at random
            victim.start()
        return bool(killed)

    def _phases(self, gateway: GatewayProcess) -> dict[str, int]:
        """Return what a gateway is at, with the process that is."""
        port = int(self.receiver.url.rsplit(":", 1)[1].split("/")[0])
        found = phases_of(gateway, self.files, port, self._status_of)
        pid = gateway.process.pid if gateway.process else 0
        if self.clients.online[self.gateways.index(gateway)]:
            found["online"] = pid
        if not found.keys() & set(OF_CARRIER) and (at := carriers(gateway)) and self._runs():
            found["waiting"] = at[0]
        return found

    def _runs(self) -> bool:
        return bool(client_of(self.store).zcard("warmq:gateway:due:batch"))

    def _status_of(self, file_id: str) -> str:
        batch_id = self._by_file.get(file_id, "")
        document = client_of(self.store).hget(f"warmq:gateway:batch:{batch_id}", "document")
        return str(orjson.loads(document).get("status", "validating")) if document else "validating"
