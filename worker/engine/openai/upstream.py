"""One server with OpenAI's API: how its health and its models are read.

Its limit of requests in flight is a set number, or follows the server's own metrics so that a few
requests wait there and no more: no slot idles, no other client is pushed back.
"""

import asyncio
import logging
import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from worker.engine.openai.dialect import Dialect
from worker.engine.remote.server import Health, Report, Server

log = logging.getLogger(__name__)

#: How long a question about health, models or a prompt's tokens may take.
ASK_S = 5.0
FIRST_LIMIT = 32
#: What is left of the most that ran at once, each second: half of it after 70 s.
PEAK_FADES = 0.99
#: Most requests in flight per server where no number is set.
CEILING = 256
KEY_REFUSED = "refuses the key: WARMQ_OPENAI_API_KEY"
#: KV cache use above which no more requests are added.
KV_FULL = 0.95
#: Share of its limit a server must be filled to before the limit may grow.
FILLED = 0.9

METRIC = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total"
    rb"|prompt_tokens_total)(?:\{[^\n]*\})? (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$",
    re.MULTILINE,
)


class Upstream(Server):
    """One server: `base` ends in /v1, `root` is where /health and /metrics are.

    `models` is what it lists, `model` which of them is asked; `vllm`: it is vLLM's own server.
    """

    limit: int

    def __init__(
        self, base: str, session: aiohttp.ClientSession, model: str | None, limit: int | None
    ) -> None:
        super().__init__(urlsplit(base).netloc, limit or FIRST_LIMIT)
        self.base, self.root = base, base.removesuffix("/v1")
        self.session = session
        self.models: dict[str, dict[str, Any]] = {}
        self.model = ""
        self.vllm = False
        #: How it answers, by url.
        self.dialects: defaultdict[str, Dialect] = defaultdict(Dialect)
        self._wanted = model
        self._adaptive = limit is None
        self._tokens = -1.0
        self._peak = 0.0

    def pause(self, wait_s: float | None) -> None:
        """Leave it alone for a while; if its limit was found here, it was too high."""
        if self._adaptive and self.up and time.monotonic() >= self.rest_until:
            self.limit = max(1, int(0.7 * min(self.limit, self.in_flight)))
        super().pause(wait_s)

    async def ask(self) -> Report:
        """Ask for its health; if it was away, or knows no /health, also for its models."""
        try:
            status, _ = await self._get(self.root + "/health")
            if status in (404, 405) or (status < 400 and not self.up):
                status, page = await self._get(self.base + "/models")
                if problem := self._learn(status, page):
                    return Report(Health.UNUSABLE, problem)
        except TimeoutError:
            return Report(Health.SILENT, "does not answer")
        except (aiohttp.ClientError, OSError) as error:
            return Report(Health.ILL, f"cannot be reached: {_reason(error)}")
        if status >= 500:
            return Report(Health.ILL, f"its health is {status}")
        return Report(Health.WELL)

    async def _get(self, url: str) -> tuple[int, bytes]:
        async with asyncio.timeout(ASK_S), self.session.get(url, allow_redirects=False) as response:
            return response.status, await response.read()

    def _learn(self, status: int, page: bytes) -> str:
        """Read the list of models; return why the server cannot be used, or nothing.

        A server without such a list is used if WARMQ_MODEL is set.
        """
        if status in (401, 403):
            return KEY_REFUSED
        try:
            listed = orjson.loads(page)["data"] if status == 200 else []
            self.models = {str(model["id"]): model for model in listed}
        except (ValueError, LookupError, TypeError):
            self.models = {}
        self.model = self._wanted or next(iter(self.models), "")
        self.vllm = self.models.get(self.model, {}).get("owned_by") == "vllm"
        if self.model and (not self.models or self.model in self.models):
            return ""
        listing = ", ".join(self.models) or "lists no model"
        return f"serves {listing}; WARMQ_MODEL is {self._wanted or 'not set'}"

    async def measure(self) -> None:
        """Read its metrics, and adapt its limit to them unless that is a set number."""
        metrics = None
        try:
            status, page = await self._get(self.root + "/metrics")
            metrics = read_metrics(page) if status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.debug("metrics of %s: %s", self.name, error)
        if metrics is not None and metrics.tokens != self._tokens:
            # What is not streamed, or waits behind other clients, is seen to move here only.
            self._tokens = metrics.tokens
            self.progress()
        if self._adaptive and time.monotonic() >= self.rest_until:
            running = metrics.running if metrics is not None else 0.0
            self._peak = max(running, PEAK_FADES * self._peak)
            self.limit = next_limit(self.limit, self.in_flight, metrics, self._peak)


def _reason(error: Exception) -> str:
    """Say what is wrong without the address, which stands before it."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number is not None and number > 0 else str(error)


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a vLLM server says of itself, all its clients and replicas together.

    `kv` is the fullest replica's share of its KV cache, `tokens` counts prompt and output
    tokens since the server's start.
    """

    running: float
    waiting: float
    kv: float
    tokens: float


def read_metrics(page: bytes) -> Metrics | None:
    """Read a Prometheus page; None if it is not vLLM's."""
    found: dict[bytes, list[float]] = {}
    for name, value in METRIC.findall(page):
        found.setdefault(name, []).append(float(value))
    if b"num_requests_running" not in found:
        return None
    total = {name: sum(values) for name, values in found.items()}
    return Metrics(
        total[b"num_requests_running"],
        total.get(b"num_requests_waiting", 0.0),
        max(found.get(b"kv_cache_usage_perc", [0.0])),
        total.get(b"generation_tokens_total", 0.0) + total.get(b"prompt_tokens_total", 0.0),
    )


def next_limit(limit: int, in_flight: int, metrics: Metrics | None, peak: float) -> int:
    """Return the limit for the next second; `peak` is the most that ran at once of late.

    Requests that began together end together. Others must wait there already, or slots stay empty
    for a round trip. `peak` stands for the number of slots: just after many ended together, few
    run and many wait. Without metrics the limit grows slowly, and only a 429 or 503
    (Upstream.pause) lowers it.
    """
    if in_flight < FILLED * limit:
        return limit  # what waits there is not for want of a higher limit
    if metrics is None:
        return min(CEILING, limit + 4)
    excess = int(metrics.running + metrics.waiting - peak - waiting_room(peak))
    if excess > 0:
        return max(1, min(limit, in_flight) - excess)
    if metrics.waiting == 0 and metrics.kv < KV_FULL:
        return min(CEILING, limit + max(4, limit // 2))
    return limit


def waiting_room(peak: float) -> int:
    """Return how many requests may wait in a server that runs so many at once."""
    return min(64, max(8, int(peak) // 2))
