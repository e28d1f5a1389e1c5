"""Slots and latencies without a model, for queues of other projects' making; needs nothing.

SLOTS_NUMBER run at once, each for a lognormal time of mean SLOTS_LATENCY_S (sigma 0.5), as
warmq's simulated engine does. After SLOTS_COUNT requests what was seen is written to SLOTS_OUT. The
first request only shows that the worker is ready; the account begins with the second.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

SIGMA = 0.5


class Slots:
    """The simulated engine and its own account of how full it was."""

    def __init__(self) -> None:
        self._slots = int(os.environ["SLOTS_NUMBER"])
        self._latency_s = float(os.environ["SLOTS_LATENCY_S"])
        self._count = int(os.environ["SLOTS_COUNT"])
        self._out = Path(os.environ["SLOTS_OUT"])
        self._random = random.Random(7)
        self._free = asyncio.Semaphore(self._slots)
        self._running = self._started = self._finished = 0
        self._used_s = 0.0
        self._first = self._mark = time.monotonic()
        self._at_last_start = (0.0, 0.0)

    async def generate(self, body: dict[str, Any], _request_id: str) -> dict[str, Any]:
        """Wait for a slot and the latency; return an answer of a real one's shape."""
        async with self._free:
            self._account(+1)
            if self._latency_s:
                mean = math.log(self._latency_s) - SIGMA**2 / 2
                await asyncio.sleep(self._random.lognormvariate(mean, SIGMA))
            else:
                await asyncio.sleep(0)
            self._account(-1)
        return {"choices": [{"text": f"simulated {body['prompt'][:8]}", "finish_reason": "stop"}]}

    def shutdown(self) -> None:
        """It has no processes."""

    def _account(self, change: int) -> None:
        now = time.monotonic()
        self._used_s += self._running * (now - self._mark)
        self._mark = now
        self._running += change
        if change > 0:
            self._started += 1
            if self._started == 2:
                self._first, self._used_s = now, 0.0
            self._at_last_start = (now - self._first, self._used_s)
            return
        self._finished += 1
        if self._finished == self._count:
            self._write()

    def _write(self) -> None:
        """From the first start to the last one there was a backlog."""
        seconds, used_s = self._at_last_start
        occupancy = used_s / (self._slots * seconds) if seconds else 0.0
        new = self._out.with_suffix(".new")
        new.write_text(json.dumps({"occupancy": occupancy, "backlog_s": seconds}))
        new.replace(self._out)
