"""A process with the drain and nothing of Celery, over the simulated engine, that takes times.

Started by the parts of worker_cost and others with the worker's own settings (WARMQ_*);
SIGTERM ends it and writes what it saw as JSON to the file named on its command
line. All clocks are time.monotonic(), which processes of one machine share.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common.report import percentile

from contract.settings import load
from demo.stack import environment_of
from worker.drain.drain import Drain
from worker.drain.endings import Ending
from worker.drain.leases import Leases, Popped
from worker.drain.loop import run_drain
from worker.drain.side_tasks import SideTasks
from worker.engine import Completion, EngineRequest
from worker.engine.simulated import SimulatedSettings
from worker.engine.simulated.engine import SimulatedEngine

#: Above so many requests only the distribution is written, not each request's times.
EACH = 2000


class TimedEngine(SimulatedEngine):
    """The simulated engine; remembers when requests came and when it finished them."""

    def __init__(self, settings: SimulatedSettings, seed: int) -> None:
        slots, tests = settings.simulated_slots, settings.simulated_tests
        super().__init__(slots, tests.latency_s, seed, tests.step_s)
        self.came: dict[str, float] = {}
        self.finished: dict[str, float] = {}
        self._working = 0
        self._occupied_s = 0.0
        self._mark = time.monotonic()

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request and take its times."""
        self.came[request_id] = time.monotonic()
        completion = await super().generate(request, request_id)
        self.finished[request_id] = time.monotonic()
        return completion

    def occupied(self) -> float:
        """Return slot-seconds used so far."""
        return self._occupied_s + self._working * (time.monotonic() - self._mark)

    async def _work(self, body: dict[str, Any]) -> None:
        self._account(+1)
        try:
            await super()._work(body)
        finally:
            self._account(-1)

    def _account(self, change: int) -> None:
        now = time.monotonic()
        self._occupied_s += self._working * (now - self._mark)
        self._mark = now
        self._working += change


class TimedLeases(Leases):
    """The leases; remember POPs with the slot-seconds used by then, and when results were in."""

    def __init__(self, settings: SimulatedSettings, worker_id: str, engine: TimedEngine) -> None:
        super().__init__(settings, worker_id)
        self.engine = engine
        self.pops: list[tuple[float, float]] = []
        self.committed: dict[str, float] = {}
        self.groups = 0

    async def pop(self, *args: Any, **kwargs: Any) -> Popped:
        """Lease requests and take the time."""
        popped = await super().pop(*args, **kwargs)
        if popped.deliveries:
            self.pops.append((time.monotonic(), self.engine.occupied()))
        return popped

    async def done(self, endings: Sequence[Ending]) -> int:
        """Commit endings and take the time at which Redis has confirmed them."""
        written = await super().done(endings)
        now = time.monotonic()
        self.groups += 1
        for ending in endings:
            self.committed[ending.delivery.request_id] = now
        return written

    def seen(self) -> dict[str, Any]:
        """Return what was measured."""
        engine = self.engine
        waits = [
            1000 * (self.committed[rid] - at)
            for rid, at in engine.finished.items()
            if rid in self.committed
        ]
        found: dict[str, Any] = {
            "requests": len(waits),
            "pops": len(self.pops),
            "commit_groups": self.groups,
        }
        if len(self.pops) > 1:
            (began, used_before), (ended, used) = self.pops[0], self.pops[-1]
            backlog_s = ended - began
            found |= {
                "backlog_s": backlog_s,
                "occupancy": (used - used_before) / (engine.slots * backlog_s),
            }
        if waits:
            found |= {
                "finish_to_committed_ms_p50": statistics.median(waits),
                "finish_to_committed_ms_p99": percentile(waits, 0.99),
            }
        found["came"] = engine.came
        if len(waits) <= EACH:
            found["finish_to_committed_ms"] = waits
        return found


async def main(seed: int) -> dict[str, Any]:
    """Drain until SIGTERM; return what was seen."""
    settings = load(SimulatedSettings)
    engine = TimedEngine(settings, seed)
    leases = TimedLeases(settings, f"probe.{os.getpid()}", engine)
    drain = Drain(settings, leases, lambda: engine)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drain.stop)
    await run_drain(drain, SideTasks(drain).tasks())
    await leases.close()
    return leases.seen()


class Probe:
    """Starts this module as a process; `seen` is what it measured, after its end.

    Several at once want another `seed` each, or their engines' latencies are the same.
    """

    def __init__(self, redis_url: str, out: Path, *, seed: int = 7, **settings: object) -> None:
        self.seen: dict[str, Any] = {}
        self._out = out
        chosen: dict[str, object] = {"redis_url": redis_url, "engine": "simulated"} | settings
        env = environment_of(chosen)
        self.process = subprocess.Popen([sys.executable, __file__, str(out), str(seed)], env=env)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.process.terminate()
        self.process.wait(30)
        if self._out.exists():
            self.seen = json.loads(self._out.read_text())
            self._out.unlink()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asyncio.run(main(int(sys.argv[2])))))
