"""Measures once a second what people feel at a server that they share with the worker.

guard.py decides how many requests may be in flight.
"""

import asyncio
import time
from statistics import median

from contract.openai.body import CHAT_URL, COMPLETION_URL, COUNTING
from worker.engine.openai.exchange import Json, smallest
from worker.engine.openai.guard import PROBES, QUIET_PROBES, Guard, Observed
from worker.engine.openai.metrics import Metrics, Seconds
from worker.engine.openai.retries import Unanswered
from worker.engine.openai.upstream import Upstream

#: vLLM's `priority` of our requests; people's is 0, and requests with lower numbers come first.
PRIORITY = 10
#: Seconds between two probes while no request of ours is in flight.
QUIET_PROBE_S = 10
#: The X-Request-Id header of a probe.
PROBE_ID = "warmq-probe"


def priority(url: str, body: Json) -> Json:
    """Return the `priority` that puts a request behind people's; a higher one of its own stays."""
    return {} if url in COUNTING else {"priority": max(PRIORITY, body.get("priority") or 0)}


class Sharing:
    """Adapts the limit of one server: `next_limit` is called once a second."""

    def __init__(self, upstream: Upstream, guard: Guard) -> None:
        self._upstream, self.guard = upstream, guard
        self._seconds = Seconds()
        self._probe: asyncio.Task[None] | None = None
        self._ttft_s: float | None = None
        self._quiet_s = 0
        #: Urls that the server refuses for probes.
        self._refused: set[str] = set()
        upstream.limit, upstream.adapt = guard.limit, self.next_limit
        upstream.sharing = guard.shown

    def next_limit(self, metrics: Metrics | None, own: int) -> int:
        """Return the limit for the next second; `own` is the most requests of ours in flight."""
        probing = self._probe is not None and not self._probe.done()
        shown = self._seconds.next(metrics, own + probing, self._upstream.finished)
        ttft_s, self._ttft_s = self._ttft_s, None
        observed = Observed(own, ttft_s, shown.itl_s, shown.waiting, shown.other_clients)
        self.guard.limit = min(self.guard.limit, self._upstream.limit)  # a rest has lowered it
        limit = self.guard.step(observed)
        busy = own > 0 or self.guard.learning or not limit
        self._quiet_s = 0 if busy else self._quiet_s + 1
        if not probing and (busy or self._quiet_s % QUIET_PROBE_S == 1):
            self._probe = asyncio.create_task(self._measure(PROBES if own else QUIET_PROBES))
        return limit

    async def close(self) -> None:
        """End the probe."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])

    async def _measure(self, times: int) -> None:
        """Send probes, and note the median of their times; if most are much too late, pause."""
        tokens, times_s, late = self.guard.probe_tokens, list[float](), 0
        for _ in range(times if tokens == 1 else 1):
            if (answer_s := await self._send(tokens)) is not None:
                times_s.append(answer_s)
                late += answer_s >= self.guard.patience_s
            if late > times // 2:  # the median is late, whatever the remaining probes show
                break
        if tokens == 1 and times_s:
            self._ttft_s = median(times_s)
            limit = self.guard.alarm(self._ttft_s)
            self._upstream.limit = min(self._upstream.limit, limit)

    async def _send(self, tokens: int) -> float | None:
        """Send one probe; return the seconds that it took, or None if it shows nothing."""
        urls = (CHAT_URL, COMPLETION_URL, *self._upstream.breaker.served)
        url = next((url for url in urls if url not in self._refused), None)
        if url is None:
            return None
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.guard.patience_s):
                await smallest(self._upstream, url, PROBE_ID, tokens)
        except TimeoutError:
            pass  # the time limit then counts as the probe's time
        except Unanswered as fault:
            if fault.refuses or fault.lacks_url:
                self._refused.add(url)
            return None
        return time.monotonic() - began
