"""One server with OpenAI's API: how its health and its models are read.

Its limit of requests in flight is a set number, or follows the server's
own metrics, so that a few requests wait there and no more: no slot idles, no other client is pushed
back. What its streams are like no setting says: its answers show it (`Dialect`).
"""

import asyncio
import logging
import math
import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

import aiohttp
import orjson

from contract.openai.body import CHAT_URL
from worker.engine.openai.judge import Judge
from worker.engine.openai.retries import Unanswered, unanswered
from worker.engine.remote.fleet import Health, Report, Server

log = logging.getLogger(__name__)

#: How long a question about health, models or a prompt's tokens may take.
ASK_S = 5.0
FIRST_LIMIT = 32
#: What is left of the most that ran at once, each second: half of it after 70 s.
PEAK_FADES = 0.99
KEY_REFUSED = "refuses the key: WARMQ_OPENAI_API_KEY"
#: How often servers that are not vLLM's are asked for their health.
RARELY_S = 30.0
#: Statuses of a server that has no list of models.
NO_LIST = (404, 405, 501)
#: A url that every server has.
POSTED = CHAT_URL.removeprefix("/v1")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of a GET."""

    status: int
    body: bytes
    location: str | None

    @classmethod
    async def of(cls, response: aiohttp.ClientResponse) -> Self:
        """Read it."""
        location = response.headers.get("Location")
        return cls(response.status, await response.read(), location)

    @property
    def words(self) -> str:
        """What it says."""
        return unanswered(self.status, self.body, location=self.location).message

    @property
    def told(self) -> str:
        """Its status, and what it says."""
        return self.words if str(self.status) in self.words else f"{self.status}: {self.words}"

    @property
    def models(self) -> dict[str, dict[str, Any]] | None:
        """The models that it lists, by name; None if it is no list."""
        try:
            listed = orjson.loads(self.body)["data"] if self.status == 200 else None
            return None if listed is None else {str(model["id"]): model for model in listed}
        except (ValueError, LookupError, TypeError):
            return None


class Upstream(Server):
    """One server: `base` ends in /v1, `root` is where /health and /metrics are.

    `models` is what it lists, `model` which of them is asked; `vllm`: it is vLLM's own server;
    `judge`: whose fault it is if it does not answer.
    """

    limit: int
    away_if_stalled = False
    #: Servers and models that were well in this process: what is wrong later, no setting mends.
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
        #: How it answers, by url.
        self.dialects: defaultdict[str, Dialect] = defaultdict(Dialect)
        self.judge = Judge(self.name)
        self._wanted = model
        self._health_path = health_path
        self._adaptive = limit is None
        self._metrics = True
        self._tokens = -1.0
        self._peak = 0.0
        self._ills = self._lowered_from = 0
        self._moved_at = 0.0

    @property
    def trouble(self) -> str:
        """Why it gets no requests, in the server's own words; '' if nothing is wrong."""
        return super().trouble or self.judge.says

    @property
    def opens_at(self) -> float:
        """Until when it rests."""
        return max(self.rest_until, self.judge.rest_until)

    def free(self, now: float) -> bool:
        """Whether it may get one more request."""
        return super().free(now) and self.judge.admits(now)

    def sends(self) -> None:
        """Note that it gets a request."""
        super().sends()
        self.judge.sends()

    def unsent(self) -> None:
        """Note that a request is not sent; while the server rests it was the probe."""
        self.judge.leaves(math.inf)

    def lower_limit(self) -> None:
        """If its limit was found here, it is lower after each rest."""
        if not self._lowered_from:
            self._lowered_from = self.limit
            if self._adaptive:  # what is not in flight has not been too much
                self.limit = min(self.limit, max(1, self.in_flight))
        if self._adaptive:
            self.limit = max(1, int(0.7 * self.limit))

    def ends_rests(self, *, well: bool) -> None:
        """Let its limit grow again; if the server was `well` all the time, it is as before."""
        if well and self._lowered_from:
            self.limit = self._lowered_from
        self._lowered_from = 0

    async def ask(self) -> Report:
        """Ask for its health; if it was away, also for its models.

        vLLM's own /health costs nothing, and is asked every second. With others it may ask every
        model behind them: their list of models is asked for, or WARMQ_OPENAI_HEALTH_PATH, rarely.
        """
        try:
            report = await self._ask()
            self._ills = 0 if report.health is Health.WELL else self._ills + 1
        except TimeoutError:
            report, self._ills = Report(Health.SILENT, "does not answer"), 0
        except (aiohttp.ClientError, OSError) as error:
            report, self._ills = Report(Health.ILL, f"cannot be reached: {_reason(error)}"), 0
        if report.health is Health.WELL:
            self.were_well.add((self.base, self._wanted))
            self._rarely(RARELY_S)
        elif self._ills:
            self._rarely(min(2.0 ** (self._ills - 1), RARELY_S))
        if report.health is Health.UNUSABLE and (self.base, self._wanted) in self.were_well:
            return Report(Health.ILL, report.why)
        return report

    def _rarely(self, seconds: float) -> None:
        if self._health_path or not self.vllm:
            self.ask_from = time.monotonic() + seconds

    async def _ask(self) -> Report:
        if not self.up and (problem := await self._learn()):
            return problem
        path = self._health_path or ("/health" if self.vllm else "")
        if not path and not self.up:
            return Report(Health.WELL)  # it has just listed its models
        answer = await self._get(self.root + path if path else self.base + "/models")
        # Of what else may be wrong, its answers to requests tell.
        if answer.status >= 500 or (answer.status >= 300 and not self.up):
            return Report(Health.ILL, f"its health is {answer.told}")
        return Report(Health.WELL)

    async def _get(self, url: str) -> _Answer:
        async with asyncio.timeout(ASK_S), self.session.get(url, allow_redirects=False) as response:
            return await _Answer.of(response)

    async def _learn(self) -> Report | None:
        """Read the list of models; return why the server cannot be used yet, or at all.

        A server without such a list is used if WARMQ_MODEL is set.
        """
        listed = await self._get(self.base + "/models")
        if listed.status in (401, 403):
            return Report(Health.UNUSABLE, f"{KEY_REFUSED} ({listed.words})")
        models = listed.models
        if not self.base.endswith("/v1") and await self._is_under_v1(models is not None):
            return Report(
                Health.UNUSABLE,
                f"serves under /v1: name {self.base}/v1 in WARMQ_OPENAI_BASE_URLS",
            )
        if models is None and not (self._wanted and listed.status in NO_LIST):
            hint = "" if self._wanted else "; if it has none, set WARMQ_MODEL"
            return Report(Health.ILL, f"its list of models is {listed.told}{hint}")
        self.models = models or {}
        self.model = self._wanted or next(iter(self.models), "")
        self.vllm = self.models.get(self.model, {}).get("owned_by") == "vllm"
        self._metrics = True
        if self.model and (not self.models or self.model in self.models):
            return None
        listing = ", ".join(self.models) or "no model"
        wanted = self._wanted or "not set"
        return Report(Health.UNUSABLE, f"serves {listing}; WARMQ_MODEL is {wanted}")

    async def _is_under_v1(self, lists: bool) -> bool:
        """Whether this server has under /v1 what it does not have under the base.

        An empty body is asked for nothing: it is refused where the url is, and 404 elsewhere.
        """
        if not lists and (await self._get(self.base + "/v1/models")).models is not None:
            return True
        here, below = [await self._post_nothing(f"{self.base}{v}{POSTED}") for v in ("", "/v1")]
        return not here and below

    async def _post_nothing(self, url: str) -> bool:
        posting = self.session.post(
            url, data=b"{}", headers={"Content-Type": "application/json"}, allow_redirects=False
        )
        async with asyncio.timeout(ASK_S), posting as response:
            return response.status in (400, 422)

    async def measure(self) -> None:
        """Read its metrics, and adapt its limit to them unless that is a set number."""
        metrics = None
        try:
            if self._metrics:
                page = await self._get(self.root + "/metrics")
                metrics = read_metrics(page.body) if page.status == 200 else None
                self._metrics = self.vllm or metrics is not None  # who has none is not asked again
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.debug("metrics of %s: %s", self.name, error)
        if metrics is not None and metrics.tokens != self._tokens:
            # What is not streamed, or waits behind other clients, is seen to move here only.
            self._tokens = metrics.tokens
            self.progress()
        moved, self._moved_at = self.progress_at > self._moved_at, self.progress_at
        if self._adaptive and moved and not self.judge.resting:
            running = metrics.running if metrics is not None else 0.0
            self._peak = max(running, PEAK_FADES * self._peak)
            self.limit = next_limit(self.limit, self.in_flight, metrics, self._peak)


def _reason(error: Exception) -> str:
    """Say what is wrong without the address, which stands before it."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number is not None and number > 0 else str(error)


# -- how many requests may be in flight: what its metrics say, and what follows --------

#: Most requests in flight per server where no number is set.
CEILING = 256
#: KV cache use above which no more requests are added.
KV_FULL = 0.95
#: EngineShare of its limit a server must be filled to before the limit may grow.
FILLED = 0.9

METRIC = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total"
    rb"|prompt_tokens_total)(?:\{[^\n]*\})? (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$",
    re.MULTILINE,
)


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
    run and many wait. Without metrics the limit grows slowly, and only a rest lowers it.
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


# -- what its streams are like, as far as was seen -------------------------------------

#: Fields that no line asks for, and how a server names them that refuses one; where it quotes what
#: it was sent, as FastAPI's do, a colon follows.
OURS = {
    "stream_options": re.compile(r"\bstream_options\b(?!['\"]\s*:)"),
    "stream": re.compile(r"\bstream(ing)?\b(?!['\"]\s*:)", re.IGNORECASE),
}
#: A server that ends so many whole streams in a row without [DONE] has left off sending it.
MISSED = 2
#: Statuses of a refused field.
_REFUSED = (400, 422, 501)


@dataclass(slots=True)
class Dialect:
    """What was seen of one server at one url.

    `sends_done`: its streams end with [DONE]; `missed`: so many whole ones in a row did not;
    `streamed`: it has answered with a stream; `refused`: which of OURS it does not take;
    `short`: so many answers in a row were whole and had fewer choices than were asked for.
    """

    sends_done: bool = False
    missed: int = 0
    streamed: bool = False
    refused: set[str] = field(default_factory=set)
    short: int = 0

    def lost(self, *, done: bool, used: bool) -> bool:
        """Note a stream of ended choices; return whether it was cut all the same.

        `done`: it ended with [DONE]; `used`: its usage came. An error may be missing, too.
        """
        self.streamed = True
        if done:
            self.sends_done, self.missed = True, 0
            return False
        lost = self.sends_done and self.missed < MISSED
        self.missed += lost and used
        return lost

    def learn(self, left_out: set[str]) -> None:
        """Note that an answer came after these fields were left out.

        Where streams were answered before, it is this request that cannot be streamed.
        """
        self.refused |= left_out - {"stream"} if self.streamed else left_out


def refused_field(fault: Unanswered, sent: dict[str, object]) -> str | None:
    """Return which of our own fields a server refuses, if it names one that was sent."""
    if fault.what in _REFUSED:
        words = f"{fault.message} {fault.error}"
        for name, naming in OURS.items():
            if name in sent and naming.search(words):
                return name
    return None
