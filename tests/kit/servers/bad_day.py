"""A day of a bad server, on a simulated clock: it is well and not well by turns, before many lines.

`make bad-days-full` runs ten of them.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from kit.drain.simulated_drain import SimulatedDrain, line
from kit.drain.simulated_time import run_simulated
from kit.servers.bad_server import BAD, OF_THE_WHOLE
from kit.servers.simulated_server import Json, Reply, SimulatedServer, answer, page

from worker.engine import EngineRequest
from worker.engine.openai.blame import CONTROL_ID
from worker.engine.openai.upstream import Upstream

DAY_S = 86_400.0
#: How long it is well, and how long not, in seconds.
WELL_S, BAD_S = (300.0, 5400.0), (5.0, 7200.0)
#: States in which one answer of ten is such, as behind a balancer with a bad replica.
PARTLY, SHARE = ("502", "cut", "429"), 0.1
STATES = [*BAD, *OF_THE_WHOLE, *(f"a tenth {name}" for name in PARTLY)]
#: Most tries, without probes, for each line.
TRIES_A_LINE = 1.05
#: One line of so many is at fault: its server answers 500 to it, whenever it is well.
AT_FAULT = 5000


class BadDay:
    """One seed's day; what is `at_fault` is named, `tries` are counted apart from probes."""

    def __init__(self, seed: int, lines: int) -> None:
        self.random = random.Random(seed)
        self.lines = lines
        self.server = SimulatedServer(seed=seed)
        self.server.post = self._post
        listing = self.server.paths["/v1/models"]
        self.server.paths["/v1/models"] = lambda: self._whole() or listing()
        self.tries = self.probes = 0
        self.states: Counter[str] = Counter()
        self.state, self.until = "well", 0.0
        self.drain: SimulatedDrain
        # So slow that these lines take the day: it is not over before the server gets bad.
        self.seconds = DAY_S * 128 / lines

    def _turn(self) -> None:
        now = time.monotonic()
        if now < self.until:
            return
        if now > DAY_S or self.state != "well":
            self.state, span = "well", WELL_S if now <= DAY_S else (DAY_S, DAY_S)
        else:
            self.state, span = self.random.choice(STATES), BAD_S
            self.states[self.state] += 1
        self.until = now + self.random.uniform(*span)

    def _whole(self) -> Reply | None:
        self._turn()
        return OF_THE_WHOLE[self.state]() if self.state in OF_THE_WHOLE else None

    def _post(self, path: str, body: Json) -> Reply:
        breaker = self.drain.engine._servers.servers[0].breaker
        probe = breaker.resting or self.server.posts[-1][2] == CONTROL_ID
        self.probes, self.tries = self.probes + probe, self.tries + (not probe)
        if (whole := self._whole()) is not None:
            return whole
        state = self.state.removeprefix("a tenth ")
        if state in BAD and (state == self.state or self.random.random() < SHARE):
            return BAD[state](path, body)
        if body.get("user") == "at fault":
            return page(500, {"error": {"message": "tensor of the wrong shape"}})
        if body["max_tokens"] == 1:
            return answer(body)
        return answer(body, self.random.uniform(0.2, 2) * self.seconds)

    def _requests(self) -> Iterator[tuple[str, EngineRequest]]:
        for n in range(self.lines):
            yield line(n, **({"user": "at fault"} if n % AT_FAULT == 7 else {}))

    def run(self, patch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Run it, and return what became of it."""
        patch.setattr(Upstream, "were_well", set())
        at_fault = {f"r{n}" for n in range(self.lines) if n % AT_FAULT == 7}

        async def main() -> float:
            self.drain = SimulatedDrain(self.server, patch)
            await self.drain.run(self._requests())
            return time.monotonic()

        hours = run_simulated(main(), patch) / 3600
        outcome = self.drain.outcome
        return {
            "lines": self.lines, "answered": len(outcome.completed), "at_fault": len(at_fault),
            "failed": len(outcome.failed), "lost": len(outcome.failed.keys() - at_fault),
            "deaths": outcome.deaths, "engines": outcome.engines, "tries": self.tries,
            "probes": self.probes, "tries_a_line": round(self.tries / self.lines, 4),
            "hours": round(hours, 1), "bad_times": sum(self.states.values()),
        }  # fmt: skip
