"""One server with OpenAI's API: its health, models, limit of requests, and form of streams.

If WARMQ_OPENAI_CONCURRENCY is not set, the limit of requests in flight follows the server's own
metrics: all slots of the server are used, and few requests wait there and delay other clients.
"""

import asyncio
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp
import orjson

from contract.openai.body import CHAT_URL
from worker.engine import RequestReturned
from worker.engine.openai.breaker import Breaker
from worker.engine.openai.dialect import Dialect
from worker.engine.openai.metrics import Metrics, next_limit, read_metrics
from worker.engine.openai.retries import read_error
from worker.engine.remote.servers import Health, Report, Server

log = logging.getLogger(__name__)

#: Seconds in which a server has to answer a health check, or a request for models or token counts.
ASK_S = 5.0
#: Limit of requests in flight at the start, until metrics have been read.
FIRST_LIMIT = 32
#: Factor by which the remembered peak of running requests shrinks each second: to half in 70 s.
PEAK_FADES = 0.99
#: Beginning of the error text for a server that refuses the API key.
KEY_REFUSED = "refuses the key: WARMQ_OPENAI_API_KEY"
#: Seconds between two health checks of a server that is not vLLM's.
RARELY_S = 30.0
#: Seconds without requests after a server refused a request because its queue was full.
FULL_S = 1.0
#: HTTP statuses with which a server without a list of models answers a request for it.
NO_LIST = (404, 405, 501)
#: A url below /v1 that every server has.
POSTED = CHAT_URL.removeprefix("/v1")


@dataclass(frozen=True, slots=True)
class _Answer:
    """A server's answer to a GET request."""

    status: int
    body: bytes
    location: str | None

    @property
    def error_text(self) -> str:
        """The error text that the server sent."""
        return read_error(self.status, self.body, location=self.location).message

    @property
    def shown(self) -> str:
        """The error text, with the HTTP status."""
        text = self.error_text
        return text if str(self.status) in text else f"{self.status}: {text}"

    @property
    def models(self) -> dict[str, dict[str, Any]] | None:
        """The listed models, by name; None if the answer is not a list of models."""
        try:
            listed = orjson.loads(self.body)["data"] if self.status == 200 else None
            return None if listed is None else {str(model["id"]): model for model in listed}
        except (ValueError, LookupError, TypeError):
            return None


class Upstream(Server):
    """One server. `base` is its base URL; /health and /metrics are below `root`.

    `models` has the listed models by name, `model` is the name that requests get. `vllm`: the
    server is vLLM's own. `breaker` decides when the server gets no requests for a time (rests).
    """

    limit: int
    down_if_stalled = False
    #: Servers, each with its model, that were healthy before, which shows that their settings work.
    were_well: ClassVar[set[tuple[str, str | None]]] = set()

    def __init__(
        self,
        base: str,
        session: aiohttp.ClientSession,
        model: str | None,
        limit: int | None,
        health_path: str = "",
        asks_release: bool = False,
    ) -> None:
        super().__init__(urlsplit(base).netloc, limit or FIRST_LIMIT)
        self.base, self.root = base, base.removesuffix("/v1")
        self.session = session
        self.models: dict[str, dict[str, Any]] = {}
        #: Whether the server's release is asked for, and its answer.
        self.asks_release, self.release = asks_release, ""
        self.model = ""
        self.vllm = False
        #: The observed form of the server's streams, by url.
        self.dialects: defaultdict[str, Dialect] = defaultdict(Dialect)
        self.breaker = Breaker(self.name)
        #: Number of requests that the server has answered, and of tokens in its answers.
        self.finished = self.written = 0
        #: At a server that people use: returns the limit for the next second (shared.py).
        self.adapt: Callable[[Metrics | None, int], int] | None = None
        #: There: the least seconds between the starts of two requests.
        self.pace_s = 0.0
        self._next_at = 0.0
        #: Returns what people feel there, for `inspect stats`.
        self.sharing: Callable[[], dict[str, Any]] | None = None
        #: The requests that `return_requests` ends.
        self._returnable: set[asyncio.Timeout] = set()
        self._model_setting = model
        self._health_path = health_path
        self._adaptive = limit is None
        self._has_metrics = True
        self._tokens = -1.0
        self._peak = 0.0
        #: Failed health checks in a row.
        self._ills = 0
        #: The limit before the present rests; 0 if there are none.
        self._lowered_from = 0
        self._moved_at = 0.0

    @property
    def trouble(self) -> str:
        """Why the server gets no requests, as an error text; '' if nothing is wrong."""
        return super().trouble or self.breaker.reason

    @property
    def shown(self) -> Any:
        """The server's row in `inspect stats`."""
        row = super().shown
        if self.sharing is None or not self.up:
            return row
        return row | {"limit": self.limit, "shared": self.sharing()}

    @property
    def needs_streams(self) -> bool:
        """Whether only streams show that the server makes steps: it has no metrics of vLLM's."""
        return self._tokens < 0

    @property
    def opens_at(self) -> float:
        """The time from which the server may get one more request, unless it is full."""
        return max(self.rest_until, self.breaker.rest_until, self._next_at)

    def free(self, now: float) -> bool:
        """Whether the server may get one more request."""
        return super().free(now) and now >= self._next_at and self.breaker.admits(now)

    def gets_request(self) -> None:
        """Note that the server gets a request."""
        super().gets_request()
        # One late start does not delay the next one.
        now = time.monotonic()
        self._next_at = max(self._next_at, now - self.pace_s) + self.pace_s
        self.breaker.sent()

    def note_unsent(self) -> None:
        """Note that the server's latest request (during a rest: the probe) is not sent."""
        self.breaker.left(math.inf)

    @asynccontextmanager
    async def returnable(self) -> AsyncIterator[None]:
        """Run one request in this context; `return_requests` ends it with RequestReturned."""
        scope = asyncio.timeout(None)
        self._returnable.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise RequestReturned(f"{self.name} is needed by its other clients") from error
        finally:
            self._returnable.discard(scope)

    def return_requests(self) -> None:
        """End every request of ours at the server; it goes back to the queue."""
        for scope in self._returnable:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    def lower_limit(self) -> None:
        """Lower the limit; called at each rest. A limit set by the user does not change."""
        if not self._lowered_from:
            self._lowered_from = self.limit
            if self._adaptive:  # only requests in flight can have overloaded the server
                self.limit = min(self.limit, max(1, self.in_flight))
        if self._adaptive:
            self.limit = max(1, int(0.7 * self.limit))

    def queue_is_full(self, wait_s: float | None) -> None:
        """Send nothing for a moment, then only as much as the server has taken."""
        if self._adaptive:
            self.limit = min(self.limit, max(1, self.in_flight - 1))
        self.rest_until = max(self.rest_until, time.monotonic() + max(FULL_S, wait_s or 0.0))

    def end_rests(self, *, well: bool) -> None:
        """Let the limit grow again. Restore it if the server was healthy all the time (`well`)."""
        if well and self._lowered_from:
            self.limit = self._lowered_from
        self._lowered_from = 0

    async def ask(self) -> Report:
        """Check the server's health; if it was down, also read its models.

        The /health of vLLM costs nothing, and is read every second. For any other check (the list
        of models, or WARMQ_OPENAI_HEALTH_PATH) a server may ask every model behind it. So such a
        check is made every RARELY_S seconds, and sooner only after a failed one.
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
            self.were_well.add((self.base, self._model_setting))
        if (well or self._ills) and (self._health_path or not self.vllm):
            pause_s = RARELY_S if well else min(2.0 ** (self._ills - 1), RARELY_S)
            self.check_from = time.monotonic() + pause_s
        if report.health is Health.UNUSABLE and (self.base, self._model_setting) in self.were_well:
            return Report(Health.ILL, report.why)
        return report

    async def _ask(self) -> Report:
        if not self.up and (problem := await self._list_models()):
            return problem
        path = self._health_path or ("/health" if self.vllm else "")
        if not path and not self.up:
            return Report(Health.WELL)  # the server has just listed its models
        answer = await self._get(self.root + path if path else self.base + "/models")
        # Other problems appear in the server's answers to requests.
        if answer.status >= 500 or (answer.status >= 300 and not self.up):
            return Report(Health.ILL, f"its health is {answer.shown}")
        return Report(Health.WELL)

    async def _get(self, url: str) -> _Answer:
        getting = self.session.get(url, allow_redirects=False)
        async with asyncio.timeout(ASK_S), getting as response:
            location = response.headers.get("Location")
            return _Answer(response.status, await response.read(), location)

    async def _list_models(self) -> Report | None:
        """Read the list of models. Returns the problem if the server cannot be used, else None.

        A server without a list is used only if WARMQ_MODEL is set.
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
        if models is None and not (self._model_setting and listed.status in NO_LIST):
            hint = "" if self._model_setting else "; if it has none, set WARMQ_MODEL"
            return Report(Health.ILL, f"its list of models is {listed.shown}{hint}")
        self.models = models or {}
        self.model = self._model_setting or next(iter(self.models), "")
        self.vllm = self.models.get(self.model, {}).get("owned_by") == "vllm"
        if self.vllm and self.asks_release:
            self.release = (await self._get(f"{self.root}/version")).body.decode(errors="replace")
        self._has_metrics = True
        for dialect in self.dialects.values():
            # The server may have been restarted with vLLM's priority policy.
            dialect.refused.discard("priority")
        if self.model and (not self.models or self.model in self.models):
            return None
        names = ", ".join(self.models) or "no model"
        setting = self._model_setting or "not set"
        return Report(Health.UNUSABLE, f"serves {names}; WARMQ_MODEL is {setting}")

    @property
    def identity(self) -> str:
        """The model's card and the server's release, without what differs in each reply."""
        card = self.models.get(self.model, {})
        names = sorted(card.keys() - {"created", "permission"})
        return orjson.dumps([self.model, [[n, card[n]] for n in names], self.release]).decode()

    async def _is_under_v1(self, lists: bool) -> bool:
        """Whether this server has the API under /v1, and not directly under the base URL.

        An empty body gets status 400 or 422 where the url exists, and 404 elsewhere.
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
        """Read the server's metrics, and adapt the limit unless the user has set it."""
        metrics, own = None, self.in_flight
        try:
            if self._has_metrics:
                answer = await self._get(self.root + "/metrics")
                metrics = read_metrics(answer.body) if answer.status == 200 else None
                self._has_metrics = self.vllm or metrics is not None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.debug("metrics of %s: %s", self.name, error)
        if metrics is not None and metrics.tokens != self._tokens:
            # Requests without a stream, or behind other clients' requests, show no other progress.
            self._tokens = metrics.tokens
            self.progress()
        moved, self._moved_at = self.progress_at > self._moved_at, self.progress_at
        if self.breaker.resting:
            return
        if self.adapt is not None:
            self.limit = self.adapt(metrics, max(own, self.in_flight))
        elif self._adaptive and moved:
            running = metrics.running if metrics is not None else 0.0
            self._peak = max(running, PEAK_FADES * self._peak)
            self.limit = next_limit(self.limit, self.in_flight, metrics, self._peak)


def _reason(error: Exception) -> str:
    """Return the error's text without the address, which the message shows before it."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number is not None and number > 0 else str(error)
