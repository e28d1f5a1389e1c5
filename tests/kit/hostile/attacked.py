"""A gateway and one worker that a tenant attacks, and what the others notice of it.

The worker is watched and, when it ends, started again, as a supervisor does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai
import orjson
import psutil
from kit.engines.run_batch_lines import NAME, SERVING
from kit.gateways.gateway_process import GatewayProcess
from kit.hostile.hostile_request import Hostile, chat

from contract.openai.body import CHAT_URL
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import (
    CPU_ENGINE_ARGS,
    GPU_ENGINE_ARGS,
    RedisServer,
    Worker,
    eventually,
    on_gpu,
    tiny_model_worker,
)
from gateway.redis.api_keys import ApiKeys

LEASE_S, STALL_S, START_S = 9.0, 12.0, 60.0
#: How much longer than alone another tenant's small chat may take.
LONGER_S = 2.0
#: How much more memory the worker's processes may have than before the first attack.
GROWN_BYTES = 2**30
#: Bars that break, too, where this whole stack does not run for seconds.
TIMED = {"others wait", "heartbeat"}
#: A client waits so long for its answer, then it goes.
PATIENCE_S = 25.0
#: A hostile one waits longer: a thousand answers take two cores a while, and have their own end.
OWN_S = 60.0


@dataclass
class Watch:
    """What was seen of the worker since `clear`: its longest silence, and its memory."""

    silent_s: float = 0.0
    peak_bytes: int = 0
    #: Process ids of workers that ended by themselves, and were started again.
    ended: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Forget what was seen."""
        self.silent_s, self.peak_bytes, self.ended = 0.0, 0, []


class Attacked:
    """Redis, a worker, a gateway with keys for tenants; `watch` says what the worker did."""

    def __init__(self, folder: Path, make: Callable[[str, Path], Worker] | None = None) -> None:
        self.folder, self.watch = folder, Watch()
        self.redis = RedisServer(folder / "redis")
        self.worker = (make or tiny)(self.redis.url, folder / "worker.log")
        self.gateway = GatewayProcess(self.redis.url, folder)
        self._http = httpx.Client()
        self._ends, self._replacing = threading.Event(), threading.Lock()
        self._watching = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        """Start all, wait for the engine, and measure what a small chat takes alone."""
        self.redis.start()
        self.store = BatchStore(self.redis.client(), ttl_ms=3_600_000)
        self._client = self.redis.client()
        self._keys = ApiKeys.using(self.store)
        self.hostile, self.honest = self.key("hostile"), self.key("honest")
        self.worker.start()
        self.gateway.start()
        self.ready(4 * START_S)
        self._warm()
        self._measure_alone(3)
        self._measure_alone(5)
        self._watching.start()
        self.base_bytes = _memory(self.worker)

    def close(self) -> None:
        """End all processes."""
        self._ends.set()
        if self._watching.is_alive():
            self._watching.join(10)
        self._http.close()
        self.gateway.kill()
        self.worker.kill()
        self.redis.stop()

    def key(self, tenant: str) -> str:
        """Make a key."""
        return self._keys.create(tenant)[0]

    def sdk(self, key: str) -> openai.OpenAI:
        """Return the SDK's client for a key."""
        url = f"{self.gateway.url}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)

    def ready(self, within_s: float) -> None:
        """Wait until the worker of now is ready."""
        eventually(lambda: self._announced().get("state") == "ready", within_s, "a worker is ready")

    # -- asking -------------------------------------------------------------------------

    def post(
        self, url: str, content: bytes, key: str, wait_s: float = PATIENCE_S
    ) -> httpx.Response:
        """Send a body."""
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        # A client of its own for each call would read all certificates first, 30 ms of a core.
        return self._http.post(
            self.gateway.url + url, content=content, headers=headers, timeout=wait_s
        )

    def small_chat(self, key: str | None = None) -> tuple[int, float]:
        """Ask a small chat for an honest tenant; return status and seconds, 0 for no answer."""
        began, status = time.monotonic(), 0
        body = orjson.dumps(chat(model=NAME))
        with suppress(httpx.HTTPError):
            status = self.post(CHAT_URL, body, key or self.honest).status_code
        return status, time.monotonic() - began

    def attack(self, sends: Callable[[], str]) -> dict[str, str]:
        """Let `sends` attack while small chats are asked; return the bars that broke, by name.

        What a small chat takes alone is measured just before, for other suites may share the cores.
        If nothing but a bar of time broke, one of them may have had both: it attacks once more.
        """
        broken = self._attack(sends)
        return self._attack(sends) if broken and broken.keys() <= TIMED else broken

    def _attack(self, sends: Callable[[], str]) -> dict[str, str]:
        self._measure_alone(3)
        self.watch.clear()
        found, told = list[tuple[int, float]](), list[str]()
        sender = threading.Thread(target=lambda: told.append(sends()), daemon=True)
        sender.start()
        while sender.is_alive():
            found.append(self.small_chat())
        sender.join()
        found.append(self.small_chat())
        broken = {"own end": told[0]} if told and told[0] else {}
        worst = max(seconds for _, seconds in found)
        if worst > self.alone_s + LONGER_S:
            broken["others wait"] = f"{worst:.1f} s, alone {self.alone_s:.1f} s"
        if refused := {status for status, _ in found} - {200}:
            broken["others' answers"] = f"{sorted(refused)}"
        if self.watch.silent_s > LEASE_S / 3:
            broken["heartbeat"] = f"silent for {self.watch.silent_s:.1f} s of {LEASE_S:g} s lease"
        if (grown := self.watch.peak_bytes - self.base_bytes) > GROWN_BYTES:
            broken["memory"] = f"{grown / 2**20:.0f} MiB more"
        return broken | self._lives()

    def _warm(self) -> None:
        """Have vLLM compile its CPU sampler, in 10 s: for sampled steps, and for mixed ones."""
        sampled = orjson.dumps(chat(model=NAME, n=4, max_tokens=50, ignore_eos=True, temperature=1))
        found: list[int] = []
        sender = threading.Thread(
            target=lambda: found.append(
                self.post(CHAT_URL, sampled, self.hostile, START_S).status_code
            ),
            daemon=True,
        )
        sender.start()
        while sender.is_alive():
            self.small_chat()
        assert found == [200]

    def _measure_alone(self, times: int) -> None:
        found = [self.small_chat() for _ in range(times)]
        assert {status for status, _ in found} == {200}, found
        self.alone_s = median(seconds for _, seconds in found)

    def online(self, hostile: Hostile) -> str:
        """Send a hostile request online; return what is wrong with its end, or nothing."""
        content = hostile.content(NAME)
        try:
            answer = self.post(hostile.url, content, self.hostile, OWN_S)
        except httpx.HTTPError as error:
            return f"no answer: {error!r}"
        wrong = hostile.fault(answer.status_code, answer.headers.get("retry-after"))
        return f"{wrong}: {answer.text[:300]}" if wrong else ""

    def _lives(self) -> dict[str, str]:
        """Wait until the worker works; replace one that does not within its bound, and say so."""
        until = time.monotonic() + STALL_S + START_S
        while time.monotonic() < until:
            status, seconds = self.small_chat()
            if status == 200 and seconds <= self.alone_s + LONGER_S:
                return {}
        self._replace()
        self.ready(2 * START_S)
        return {"life": f"neither works nor was replaced within {STALL_S + START_S:g} s"}

    def cpu_s(self) -> dict[str, float]:
        """Return the seconds of a core that each part has had, with its descendants; ours, too."""
        parts = {"worker": self.worker.process, "gateway": self.gateway.process,
                 "redis": self.redis.process}  # fmt: skip
        found = {name: _cpu_s(process.pid) for name, process in parts.items() if process}
        return found | {"client": time.process_time()}

    # -- looking ------------------------------------------------------------------------

    def _look(self) -> None:
        at = 0
        while not self._ends.wait(0.1):
            process = self.worker.process
            if process is not None and process.poll() is not None:
                self.watch.ended.append(process.pid)
                self._replace()
                continue
            announced = self._announced()
            if announced.get("state") == "ready":
                self.watch.silent_s = max(self.watch.silent_s, announced["silent_s"])
            at += 1
            if at % 10 == 0:  # it looks at all processes of the machine
                self.watch.peak_bytes = max(self.watch.peak_bytes, _memory(self.worker))

    def _announced(self) -> dict[str, Any]:
        """Return what the worker of now has last said; {} if nothing."""
        with self._replacing:
            pid = str(self.worker.pid)
        raw, (now_s, now_us) = self._client.hgetall(keys.WORKERS), self._client.time()
        for name, record in raw.items():
            if name.decode().split(".")[-2] == pid:
                at, _, said = record.partition(b"\0")
                silent_s = now_s + now_us / 1e6 - int(at) / 1000
                return {**orjson.loads(said), "silent_s": silent_s}
        return {}

    def _replace(self) -> None:
        with self._replacing:
            self.worker.kill()  # of its group: its engine may have stayed
            self.worker.start()


def tiny(url: str, log: Path, engine_args: str | None = None) -> Worker:
    """Return a worker with vLLM and the shipped model; `engine_args` instead of the device's."""
    args = engine_args or f"{GPU_ENGINE_ARGS if on_gpu() else CPU_ENGINE_ARGS} {SERVING}"
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return tiny_model_worker(
        url, log, env=env, served_model_name=NAME, engine_args=args,
        lease_s=LEASE_S, stall_timeout_s=STALL_S, drain_timeout_s=5,
    )  # fmt: skip


def _memory(worker: Worker) -> int:
    """Return the bytes of a worker and its descendants; what they share counts once."""
    total = 0
    with suppress(psutil.Error):
        whole = psutil.Process(worker.pid)
        for process in (whole, *whole.children(recursive=True)):
            with suppress(OSError):
                told = Path(f"/proc/{process.pid}/smaps_rollup").read_text().partition("\nPss:")[2]
                total += 1024 * int(told.split()[0]) if told else 0
    return total


def _cpu_s(pid: int) -> float:
    """Return the seconds of a core of a process and its descendants, ended ones included."""
    total = 0.0
    with suppress(psutil.Error):
        whole = psutil.Process(pid)
        for process in (whole, *whole.children(recursive=True)):
            with suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])
    return total


@contextmanager
def attacked(folder: Path, make: Callable[[str, Path], Worker] | None = None) -> Iterator[Attacked]:
    """Yield all of it, ready; `make` makes another worker of Redis' URL and a log's path."""
    found = Attacked(folder, make)
    try:
        found.start()
        yield found
    finally:
        found.close()
