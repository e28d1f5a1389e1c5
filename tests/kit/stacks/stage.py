"""A private Redis and several simulated workers that faults are done to."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import redis
from kit.protocol import script_keys
from kit.protocol.lessee import Submitted, chat, client_of, submit_batch
from kit.redis_servers.wrong_clock import WrongClock
from kit.verdicts.observer import WATCHED, Computed, EngineLog
from kit.verdicts.settled import assert_batch_settled, assert_committed_once, assert_nothing_left
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from contract.redis import keys
from contract.redis.announcements import is_alive
from contract.redis.batches import BatchStore
from demo.stack import ROOT, RedisServer, Worker, eventually, tiny_model_worker

LEASE_S = 2.0
TTL_MS = 600_000


class Stage:
    """One Redis, one engine log, workers by name. All that was started ends with the stage."""

    def __init__(self, folder: Path, *redis_options: str, clock: WrongClock | None = None) -> None:
        self.folder = folder
        self.clock = clock
        self.engine_log = folder / "engine.log"
        self._log = EngineLog(self.engine_log)
        binary = clock.binary if clock else None
        self.server = RedisServer(folder / "redis", *WATCHED, *redis_options, binary=binary)
        self.workers: list[Worker] = []
        self.bodies: dict[str, dict[str, dict[str, Any]]] = {}

    @property
    def store(self) -> BatchStore:
        """The producer's store; it waits while Redis is away for a moment."""
        return self._store

    def open(self) -> None:
        """Start Redis."""
        self.server.start()
        client = redis.Redis(
            port=self.server.port,
            socket_timeout=10,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 30),
            retry_on_error=[redis.BusyLoadingError],
        )
        self._store = BatchStore(client, ttl_ms=TTL_MS)

    def close(self) -> None:
        """Kill what is left of the workers, stopped processes too, and Redis."""
        for worker in self.workers:
            self.kill_group(worker)
        self._store.close()
        if self.server.process is not None:
            self.server.process.send_signal(signal.SIGCONT)
            self.server.stop()

    # -- workers ------------------------------------------------------------------

    def worker(
        self,
        root: Path = ROOT,
        env: Mapping[str, str] | None = None,
        make: Callable[..., Worker] | None = None,
        **settings: object,
    ) -> Worker:
        """Start one more worker; it may not be ready yet.

        `make` makes one of another release of URL, log and settings.
        """
        defaults: dict[str, object] = {
            "engine": "simulated",
            "simulated_slots": 16,
            "simulated_latency_s": 0.2,
            "simulated_log": self.engine_log,
            "look_ahead": 4,
            "lease_s": LEASE_S,
            "drain_timeout_s": 10,
            "stall_timeout_s": 3,
        }
        log = self.folder / f"worker-{len(self.workers)}.log"
        url = str(settings.pop("redis_url", self.server.url))  # a proxy's, for one
        settings = defaults | settings
        worker = make(url, log, **settings) if make else Worker(url, log, root, env, **settings)
        worker.start()
        self.workers.append(worker)
        return worker

    def real_worker(
        self,
        env: Mapping[str, str] | None = None,
        kind: type[Worker] = Worker,
        **settings: object,
    ) -> Worker:
        """Start a worker with vLLM and the shipped model, or with the setting `models`."""
        log = self.folder / f"worker-{len(self.workers)}.log"
        defaults: dict[str, object] = {
            "lease_s": LEASE_S, "drain_timeout_s": 30, "stall_timeout_s": 3, "look_ahead": 8,
        }  # fmt: skip
        url = str(settings.pop("redis_url", self.server.url))
        # Several engines on one machine: bound to cores, all would be bound to the same one.
        env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"} | dict(env or {})
        if "models" in settings:
            worker = kind(url, log, env=env, **(defaults | settings)).start()
        else:
            worker = tiny_model_worker(url, log, kind, env=env, **(defaults | settings)).start()
        self.workers.append(worker)
        return worker

    def ready(self, *workers: Worker, timeout_s: float = 40) -> None:
        """Wait until these workers announce themselves as ready."""
        for worker in workers:
            eventually(
                lambda worker=worker: self.announced(worker).get("state") == "ready",
                timeout_s, f"ready: {worker.log_path}",
            )  # fmt: skip

    def announced(self, worker: Worker) -> dict[str, Any]:
        """Return what a worker tells the producers about itself, {} if nothing yet."""
        found = [w for w in self.store.announcements()
                 if w["id"].split(".")[-2] == str(worker.pid) and is_alive(w)]  # fmt: skip
        return found[-1] if found else {}

    def id_of(self, worker: Worker) -> str:
        """Return the name under which a worker holds leases; it may have gone."""
        keys_of = client_of(self.store).scan_iter(script_keys.worker_key("*"), 10_000)
        found = [key.decode() for key in keys_of if key.split(b".")[-2] == str(worker.pid).encode()]
        return found[0].removeprefix(script_keys.worker_key("")) if found else "gone"

    def picture(self) -> str:
        """Return what Redis holds of ours, each value cut short, for people to look at."""
        client = client_of(self.store)
        reads = {
            b"string": client.get, b"hash": client.hgetall,
            b"list": lambda key: (client.llen(key), client.lrange(key, -1, -1)),
            b"zset": lambda key: client.zrange(key, 0, 99, withscores=True),
        }  # fmt: skip
        found = [f"time {client.time()}"]
        for key in sorted(client.scan_iter("warmq*")):
            read = reads.get(client.type(key))
            found.append(f"{key!r} pttl {client.pttl(key)}: {str(read and read(key))[:3000]}")
        return "\n".join(found)

    def idle(self, worker: Worker, seconds: float) -> None:
        """Let a worker be for so long; it announces itself, with Redis's time, once a second."""

        def announced_at() -> float:
            records = client_of(self.store).hgetall(keys.WORKERS)
            at = [int(record.partition(b"\0")[0]) for name, record in records.items()
                  if name.decode().split(".")[-2] == str(worker.pid)]  # fmt: skip
            return max(at) / 1000

        until = announced_at() + seconds
        eventually(lambda: announced_at() > until, seconds + 10, f"{seconds} s of idleness")

    @staticmethod
    def kill(worker: Worker) -> None:
        """SIGKILL the worker alone."""
        assert worker.process is not None
        worker.process.kill()
        worker.process.wait(10)

    @staticmethod
    def kill_group(worker: Worker) -> None:
        """SIGKILL the worker's whole process group, also if the worker is gone already."""
        worker.kill()

    @staticmethod
    def engine_process(worker: Worker) -> psutil.Process:
        """Return the process that stands for EngineCore."""
        return eventually(
            lambda: next(
                (p for p in psutil.Process(worker.pid).children() if p.name() == "cat"), None
            ),
            10, "the engine's process",
        )  # fmt: skip

    # -- batches ------------------------------------------------------------------

    def submit(
        self, bodies: Sequence[Mapping[str, Any]] | int, batch_id: str = "b1", **options: Any
    ) -> Submitted:
        """Queue a batch of these bodies, or of so many."""
        if isinstance(bodies, int):
            bodies = [chat(f"question {n} of {batch_id}") for n in range(bodies)]
        found = submit_batch(self.store, bodies=[dict(b) for b in bodies], batch_id=batch_id,
                             **options)  # fmt: skip
        self.bodies[batch_id] = {f"c{n}": dict(body) for n, body in enumerate(bodies, 1)}
        return found

    def ids(self, batch_id: str = "b1") -> list[str]:
        """Return the request ids of a batch."""
        return [rid for c in self.store.index(batch_id) for rid in c.request_ids(batch_id)]

    def computed(self) -> Computed:
        """Return what the engines have computed so far."""
        return self._log.look()

    def running(self, count: int, timeout_s: float = 20) -> Computed:
        """Wait until the engines have begun at least so many computations."""
        eventually(
            lambda: self.computed().starts.total() >= count, timeout_s, f"{count} computations"
        )
        return self.computed()

    def finish(self, batch_id: str = "b1", timeout_s: float = 45) -> None:
        """Wait for the end of a batch."""

        def ended() -> bool:
            batch = self.store.batch(batch_id)
            return batch is not None and batch.finished

        eventually(ended, timeout_s, f"{batch_id} finished", 0.05)

    def settled(
        self,
        batch_id: str = "b1",
        failed: Mapping[str, str] | None = None,
        *,
        simulated: bool = True,
    ) -> None:
        """Assert that a finished batch is whole, was committed once, and left nothing behind."""
        bodies = self.bodies[batch_id]
        assert_batch_settled(
            self.store, batch_id, bodies, failed=failed, simulated=simulated, lines_in=self.folder
        )
        assert_nothing_left(self.store)
        assert_committed_once(self.server.folder, bodies, batch_id)


@contextmanager
def stage(folder: Path, *redis_options: str, clock: WrongClock | None = None) -> Iterator[Stage]:
    """Yield an empty stage, its Redis with a clock that can step; end all that it started."""
    on = Stage(folder, *redis_options, clock=clock)
    on.open()
    try:
        yield on
    finally:
        on.close()
