"""One server with OpenAI's API: its health, its models, its limit, and the form of its streams.

Without a set number, the limit of requests in flight follows the server's own metrics, so that few
requests wait there: every slot is used, and no other client is displaced.
"""

import asyncio
import logging
import math
import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp
import orjson

from contract.openai.body import CHAT_URL
from worker.engine.openai.breaker import Breaker
from worker.engine.openai.retries import Unanswered, unanswered
from worker.engine.remote.fleet import Health, Report, Server

log = logging.getLogger(__name__)

#: Timeout of a question about health, models or a prompt's tokens.
ASK_S = 5.0
FIRST_LIMIT = 32
#: Factor of the peak each second: it halves in 70 s.
PEAK_FADES = 0.99
KEY_REFUSED = "refuses the key: WARMQ_OPENAI_API_KEY"
#: Interval of questions about health for servers other than vLLM's.
RARELY_S = 30.0
#: Statuses of a server without a list of models.
NO_LIST = (404, 405, 501)
#: A url that every server has.
POSTED = CHAT_URL.removeprefix("/v1")


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to a GET."""

    status: int
    body: bytes
    location: str | None

    @property
    def error_text(self) -> str:
        """The server's own words."""
        return unanswered(self.status, self.body, location=self.location).message

    @property
    def shown(self) -> str:
        """Status and words."""
        text = self.error_text
        return text if str(self.status) in text else f"{self.status}: {text}"

    @property
    def models(self) -> dict[str, dict[str, Any]] | None:
        """The listed models, by name; None if it is not a list."""
        try:
            listed = orjson.loads(self.body)["data"] if self.status == 200 else None
            return None if listed is None else {str(model["id"]): model for model in listed}
        except (ValueError, LookupError, TypeError):
            return None


class Upstream(Server):
    """One server; `base` is its base URL, `root` the URL of its /health and /metrics.

    `models`: those that it lists; `model`: the one for requests; `vllm`: it is vLLM's own server;
    `breaker`: decides on rests.
    """

    limit: int
    down_if_stalled = False
    #: Servers and models that were well in this process: what fails later, no setting fixes.
    were_well: ClassVar[set[tuple[str, str | None]]] = set()

    def __init__(
        self,
        base: str,
        session: aiohttp.ClientSession,
        model: str | None,
        limit: int | None,
        health_path: str = "",
    ) -> None:
        super().__init__(urlsplit(base).netloc, limit or FIRST_LIMIT)
        self.base, self.root = base, base.removesuffix("/v1")
        self.session = session
        self.models: dict[str, dict[str, Any]] = {}
        self.model = ""
        self.vllm = False
        #: The form of its streams, by url.
        self.dialects: defaultdict[str, Dialect] = defaultdict(Dialect)
        self.breaker = Breaker(self.name)
        self._wanted = model
        self._health_path = health_path
        self._adaptive = limit is None
        self._has_metrics = True
        self._tokens = -1.0
        self._peak = 0.0
        self._ills = self._lowered_from = 0
        self._moved_at = 0.0

    @property
    def trouble(self) -> str:
        """The reason why it gets no requests, in its own words; '' if nothing is wrong."""
        return super().trouble or self.breaker.reason

    @property
    def opens_at(self) -> float:
        """The end of its rest."""
        return max(self.rest_until, self.breaker.rest_until)

    def free(self, now: float) -> bool:
        """Whether it may get one more request."""
        return super().free(now) and self.breaker.admits(now)

    def sends(self) -> None:
        """Note that it gets a request."""
        super().sends()
        self.breaker.sent()

    def unsent(self) -> None:
        """Note that its request, which during a rest was the probe, is not sent."""
        self.breaker.left(math.inf)

    def lower_limit(self) -> None:
        """Lower the limit at each rest, unless it is a set number."""
        if not self._lowered_from:
            self._lowered_from = self.limit
            if self._adaptive:  # only what is in flight can have been too much
                self.limit = min(self.limit, max(1, self.in_flight))
        if self._adaptive:
            self.limit = max(1, int(0.7 * self.limit))

    def end_rests(self, *, well: bool) -> None:
        """Let the limit grow again; restore it if the server was `well` all the time."""
        if well and self._lowered_from:
            self.limit = self._lowered_from
        self._lowered_from = 0

    async def ask(self) -> Report:
        """Ask for its health; if it was down, also for its models.

        vLLM's own /health costs nothing, and is asked every second. Other servers may ask every
        model behind them, so their list of models, or WARMQ_OPENAI_HEALTH_PATH, is asked rarely.
        """
        try:
            report = await self._ask()
            self._ills = 0 if report.health is Health.WELL else self._ills + 1
        except TimeoutError:
            report, self._ills = Report(Health.SILENT, "does not answer"), 0
        except (aiohttp.ClientError, OSError) as error:
            report, self._ills = Report(Health.ILL, f"cannot be reached: {_reason(error)}"), 0
        well = report.health is Health.WELL
        if well:
            self.were_well.add((self.base, self._wanted))
        if (well or self._ills) and (self._health_path or not self.vllm):
            pause_s = RARELY_S if well else min(2.0 ** (self._ills - 1), RARELY_S)
            self.ask_from = time.monotonic() + pause_s
        if report.health is Health.UNUSABLE and (self.base, self._wanted) in self.were_well:
            return Report(Health.ILL, report.why)
        return report

    async def _ask(self) -> Report:
        if not self.up and (problem := await self._list_models()):
            return problem
        path = self._health_path or ("/health" if self.vllm else "")
        if not path and not self.up:
            return Report(Health.WELL)  # it has just listed its models
        answer = await self._get(self.root + path if path else self.base + "/models")
        # Other problems show in its answers to requests.
        if answer.status >= 500 or (answer.status >= 300 and not self.up):
            return Report(Health.ILL, f"its health is {answer.shown}")
        return Report(Health.WELL)

    async def _get(self, url: str) -> _Answer:
        getting = self.session.get(url, allow_redirects=False)
        async with asyncio.timeout(ASK_S), getting as response:
            location = response.headers.get("Location")
            return _Answer(response.status, await response.read(), location)

    async def _list_models(self) -> Report | None:
        """Read the list of models; return why the server cannot be used, if it cannot.

        A server without a list is used if WARMQ_MODEL is set.
        """
        listed = await self._get(self.base + "/models")
        if listed.status in (401, 403):
            return Report(Health.UNUSABLE, f"{KEY_REFUSED} ({listed.error_text})")
        models = listed.models
        if not self.base.endswith("/v1") and await self._is_under_v1(models is not None):
            return Report(
                Health.UNUSABLE,
                f"serves under /v1: name {self.base}/v1 in WARMQ_OPENAI_BASE_URLS",
            )
        if models is None and not (self._wanted and listed.status in NO_LIST):
            hint = "" if self._wanted else "; if it has none, set WARMQ_MODEL"
            return Report(Health.ILL, f"its list of models is {listed.shown}{hint}")
        self.models = models or {}
        self.model = self._wanted or next(iter(self.models), "")
        self.vllm = self.models.get(self.model, {}).get("owned_by") == "vllm"
        self._has_metrics = True
        if self.model and (not self.models or self.model in self.models):
            return None
        listing = ", ".join(self.models) or "no model"
        wanted = self._wanted or "not set"
        return Report(Health.UNUSABLE, f"serves {listing}; WARMQ_MODEL is {wanted}")

    async def _is_under_v1(self, lists: bool) -> bool:
        """Whether this server has under /v1 what it does not have under the base.

        An empty body is refused where the url exists, and gets a 404 elsewhere.
        """
        if not lists and (await self._get(self.base + "/v1/models")).models is not None:
            return True
        here, below = [await self._refuses_empty(f"{self.base}{v}{POSTED}") for v in ("", "/v1")]
        return not here and below

    async def _refuses_empty(self, url: str) -> bool:
        posting = self.session.post(
            url, data=b"{}", headers={"Content-Type": "application/json"}, allow_redirects=False
        )
        async with asyncio.timeout(ASK_S), posting as response:
            return response.status in (400, 422)

    async def measure(self) -> None:
        """Read its metrics, and adapt the limit unless it is a set number."""
        metrics = None
        try:
            if self._has_metrics:
                page = await self._get(self.root + "/metrics")
                metrics = read_metrics(page.body) if page.status == 200 else None
                self._has_metrics = self.vllm or metrics is not None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.debug("metrics of %s: %s", self.name, error)
        if metrics is not None and metrics.tokens != self._tokens:
            # The only progress of requests that are not streamed or wait behind other clients.
            self._tokens = metrics.tokens
            self.progress()
        moved, self._moved_at = self.progress_at > self._moved_at, self.progress_at
        if self._adaptive and moved and not self.breaker.resting:
            running = metrics.running if metrics is not None else 0.0
            self._peak = max(running, PEAK_FADES * self._peak)
            self.limit = next_limit(self.limit, self.in_flight, metrics, self._peak)


def _reason(error: Exception) -> str:
    """Return the error's text without the address, which is shown before it."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number is not None and number > 0 else str(error)


# -- the limit of requests in flight, from the server's metrics ------------------------

#: Highest limit per server.
CEILING = 256
#: KV cache use above which the limit does not grow.
KV_FULL = 0.95
#: Share of the limit that must be in flight before it may grow.
FILLED = 0.9

METRIC = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total"
    rb"|prompt_tokens_total)(?:\{[^\n]*\})? (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Metrics:
    """A vLLM server's metrics: the sums over its replicas, all clients included.

    `kv`: the fullest replica's share of its KV cache; `tokens`: of prompts and outputs since the
    server's start.
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
    """Return the limit for the next second; `peak`: the most requests that ran recently.

    Requests that began together end together; unless more wait there already, slots are empty for
    a round trip. `peak` replaces the number of slots: just after many have ended, few run and
    many wait. Without metrics the limit grows slowly, and only a rest lowers it.
    """
    if in_flight < FILLED * limit:
        return limit  # a higher limit would not send more
    if metrics is None:
        return min(CEILING, limit + 4)
    excess = int(metrics.running + metrics.waiting - peak - allowed_to_wait(peak))
    if excess > 0:
        return max(1, min(limit, in_flight) - excess)
    if metrics.waiting == 0 and metrics.kv < KV_FULL:
        return min(CEILING, limit + max(4, limit // 2))
    return limit


def allowed_to_wait(peak: float) -> int:
    """Return how many requests may wait in a server that runs so many at once."""
    return min(64, max(8, int(peak) // 2))


# -- the form of its streams, as observed ----------------------------------------------

#: Fields that the worker adds, and their names in a refusal. In a quote of the request, as in
#: FastAPI's errors, a colon follows.
OURS = {
    "stream_options": re.compile(r"\bstream_options\b(?!['\"]\s*:)"),
    "stream": re.compile(r"\bstream(ing)?\b(?!['\"]\s*:)", re.IGNORECASE),
}
#: Whole streams in a row without [DONE] after which a server is known not to send it any more.
MISSED = 2
#: Statuses of a refused field.
_REFUSED = (400, 422, 501)


@dataclass(slots=True)
class Dialect:
    """Observations of one server at one url.

    `sends_done`: its streams end with [DONE]; `missed`: whole streams in a row that did not;
    `streamed`: it has answered with a stream; `refused`: the fields of OURS that it refuses;
    `short`: whole answers in a row with fewer choices than requested.
    """

    sends_done: bool = False
    missed: int = 0
    streamed: bool = False
    refused: set[str] = field(default_factory=set)
    short: int = 0

    def lost(self, *, done: bool, used: bool) -> bool:
        """Note a stream whose choices have ended; return whether its end is missing.

        `done`: it ended with [DONE]; `used`: it had a usage. An error may be missing, too.
        """
        self.streamed = True
        if done:
            self.sends_done, self.missed = True, 0
            return False
        lost = self.sends_done and self.missed < MISSED
        self.missed += lost and used
        return lost

    def learn(self, left_out: set[str]) -> None:
        """Note an answer to a request without these fields.

        If streams were answered before, it is this request that cannot be streamed.
        """
        self.refused |= left_out - {"stream"} if self.streamed else left_out


def refused_field(fault: Unanswered, sent: dict[str, object]) -> str | None:
    """Return the sent field of OURS that a server refuses by name."""
    if fault.what in _REFUSED:
        text = f"{fault.message} {fault.error}"
        for name, pattern in OURS.items():
            if name in sent and pattern.search(text):
                return name
    return None
