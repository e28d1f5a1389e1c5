"""The adapter for OpenAI-compatible servers: vLLM's own, or any other.

A server that is away is no engine that died: its requests go back to the queue unblamed, and
the next engine's `start` waits until a server is there. What becomes of each fault is a table
in retries.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from contract.errors import EngineDead, RequestFailed
from contract.openai.body import CHAT_URL, GENERATING
from contract.settings import SettingsError
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.end import close_on
from worker.engine.openai.exchange import exchange, prompt_tokens
from worker.engine.openai.reassembly import Reassembly
from worker.engine.openai.retries import (
    ATTEMPTS,
    Action,
    Condition,
    Unanswered,
    action_for,
    after_probe,
    rejection,
)
from worker.engine.openai.settings import OpenAISettings
from worker.engine.openai.upstream import CEILING, PROBE_S, Fleet, Upstream

log = logging.getLogger(__name__)

#: uvicorn closes idle connections after 5 s; a request sent on one just then is lost.
KEEP_ALIVE_S = 3.0
CONNECT_S = 10.0
#: Between attempts that may be the request's own fault, doubled each time.
BACKOFF_S = 0.25
SAY_EVERY_S = 30.0

Json = dict[str, Any]


@dataclass(slots=True)
class _Tries:
    """What has befallen one request so far."""

    faults: int = 0
    deaths: int = 0
    avoid: frozenset[Upstream] = frozenset()


class OpenAIEngine:
    """Requests in flight at one or more servers."""

    grace_s = 0.0

    def __init__(self, settings: OpenAISettings) -> None:
        self._settings = settings
        self._slots = (settings.openai_concurrency or CEILING) * len(settings.base_urls)
        self._max_model_len = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._fleet: Fleet | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._partial: dict[str, Reassembly] = {}

    # -- life -------------------------------------------------------------------

    def build(self) -> None:
        """Nothing is loaded here."""

    async def start(self) -> Capacity:
        """Wait, without end, until a server is well.

        Raises:
            SettingsError: no server takes the key, or none serves the model.
        """
        self._loop, settings = asyncio.get_running_loop(), self._settings
        key = settings.openai_api_key.get_secret_value()
        self._session = aiohttp.ClientSession(
            # All that may be in flight, and the probes beside it.
            connector=aiohttp.TCPConnector(
                limit=self._slots + 4 * len(settings.base_urls), keepalive_timeout=KEEP_ALIVE_S
            ),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # How long an answer takes is not known, only how long it may stand still: Fleet.watch.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._fleet = fleet = Fleet(
            settings.base_urls,
            self._session,
            model=settings.model,
            concurrency=settings.openai_concurrency,
            stall_s=settings.stall_timeout_s,
        )
        await self._wait_for_a_server(fleet)
        self._watches = [asyncio.create_task(fleet.watch(u)) for u in fleet.upstreams]
        served = next(u for u in fleet.upstreams if u.up)
        self._max_model_len = int(served.models.get(served.model, {}).get("max_model_len") or 0)
        return Capacity(
            max_num_seqs=self._slots,
            max_model_len=self._max_model_len,
            model=served.model,
            details={
                "engine": "openai",
                "servers": fleet.shown,
                "served_names": sorted(served.models),
                "adaptive": fleet.adaptive,
            },
        )

    async def _wait_for_a_server(self, fleet: Fleet) -> None:
        said_at = -SAY_EVERY_S
        while True:
            await asyncio.gather(*(fleet.probe(u) for u in fleet.upstreams))
            if not fleet.dead:
                return
            if all(u.closed for u in fleet.upstreams):
                raise SettingsError(f"no server can be used: {fleet.reasons}")
            if time.monotonic() - said_at >= SAY_EVERY_S:
                said_at = time.monotonic()
                log.warning(
                    "waiting for a server: %s", fleet.reasons, extra={"action": "upstream_wait"}
                )
            await asyncio.sleep(PROBE_S)

    def dead(self) -> bool:
        """Whether every server is away, or no longer watched."""
        return (
            self._fleet is None or self._fleet.dead or any(watch.done() for watch in self._watches)
        )

    def last_progress(self) -> float:
        """Return when a server last made a step; now, if no request is in any."""
        busy = [u for u in self._fleet.upstreams if u.scopes] if self._fleet else []
        return max((u.progress_at for u in busy), default=time.monotonic())

    def kill(self) -> None:
        """Give up every server; what is in them ends with EngineDead."""
        if self._fleet is not None:
            for upstream in self._fleet.upstreams:
                self._fleet.down(upstream, "was given up")
                upstream.interrupt()

    def shutdown(self) -> None:
        """Close every connection; called in the engine's thread."""
        if self._loop is not None:
            close_on(self._loop, self._close())

    async def _close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        for end in await asyncio.gather(*self._watches, return_exceptions=True):
            if isinstance(end, Exception):
                log.error("a server's watch failed", exc_info=end, extra={"action": "watch_failed"})
        if self._fleet is not None:
            await self._fleet.close()
        if self._session is not None:
            await self._session.close()
        self._session, self._fleet, self._watches = None, None, []

    # -- one request --------------------------------------------------------------

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request at whichever server has room, again elsewhere if that one fails.

        Raises:
            RequestRejected, RequestFailed, EngineDead: by the table of retries.py.
        """
        if self._fleet is None or self._session is None:
            raise EngineDead("the engine is not running", inside=False)
        fleet, session = self._fleet, self._session
        body, tries = self._with_limit(request.url, request.body), _Tries()
        while True:
            upstream = await fleet.take(tries.avoid)
            try:
                sent = self._with_model(body, upstream)
                answer = await exchange(
                    session, upstream, request.url, sent, request_id, self._partial
                )
                break
            except Unanswered as fault:
                if await self._fits_now(session, upstream, request, body, fault):
                    continue
                tries.avoid |= {upstream}
                pause_s = await self._settle(fleet, upstream, fault, tries)
            finally:
                fleet.give(upstream)
                self._partial.pop(request_id, None)
            await asyncio.sleep(pause_s)
        upstream.pause_s = 0.0
        if model := request.body.get("model"):
            answer["model"] = model
        usage = answer.get("usage") or {}
        return Completion(
            orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS),
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
        )

    def text_so_far(self, request_id: str) -> Sequence[str]:
        """Return what came of a streamed answer; nothing of one that is asked for at once."""
        answer = self._partial.get(request_id)
        return answer.texts() if answer is not None else ()

    def _with_limit(self, url: str, body: Json) -> Json:
        limits = body.get("max_tokens"), body.get("max_completion_tokens")
        if url in GENERATING and limits == (None, None):
            return body | {"max_tokens": self._settings.default_max_tokens}
        return dict(body)

    def _with_model(self, body: Json, upstream: Upstream) -> Json:
        if self._settings.served_model_name is None and body.get("model") in upstream.models:
            return body
        return body | {"model": upstream.model}  # one is served, whatever the line calls it

    async def _settle(
        self, fleet: Fleet, upstream: Upstream, fault: Unanswered, tries: _Tries
    ) -> float:
        """Do what the table says; return after how many seconds the request is sent again."""
        action = await self._decide(fleet, upstream, fault)
        message = f"{upstream.name}: {fault.message}"
        if action is Action.REJECT:
            raise rejection(fault)
        if action is Action.WAIT:
            upstream.pause(fault.wait_s, adaptive=fleet.adaptive)
            return 0.0
        if action is Action.COUNT:
            tries.faults += 1
            if tries.faults >= ATTEMPTS:
                raise RequestFailed(f"{message} ({ATTEMPTS} times)")
            return BACKOFF_S * 2.0**tries.faults
        if action is Action.DIED:
            tries.deaths += 1
        if tries.deaths > 1 or fleet.dead:
            raise EngineDead(message, inside=action is Action.DIED)
        return 0.0

    async def _decide(self, fleet: Fleet, upstream: Upstream, fault: Unanswered) -> Action:
        """Look the fault up, ask the server's health if need be, and take it out if it is away."""
        action = action_for(fault)
        if action is Action.CLOSED:
            upstream.closed = True
            fleet.down(upstream, "refuses the key: WARMQ_OPENAI_API_KEY")
        elif action is Action.PROBE:
            health = await fleet.probe(upstream)
            action = after_probe(health, fault)
            if fault.what == Condition.STALLED:
                fleet.down(upstream, "hangs")
        elif action is Action.AWAY:
            fleet.down(upstream, fault.message)
        return action

    async def _fits_now(
        self,
        session: aiohttp.ClientSession,
        upstream: Upstream,
        request: EngineRequest,
        body: Json,
        fault: Unanswered,
    ) -> bool:
        """If only our default max_tokens was too large, make it what the context leaves."""
        ours = request.body.get("max_tokens") is None and body.get("max_tokens") is not None
        if not ours or action_for(fault) is not Action.REJECT or not self._max_model_len:
            return False
        if rejection(fault).code != "context_length_exceeded":
            return False
        if request.url == CHAT_URL:
            del body["max_tokens"]  # the server then takes what is left, which is less
            return True
        longest = await prompt_tokens(session, upstream, body | {"model": upstream.model})
        left = self._max_model_len - (longest or self._max_model_len)
        if 0 < left < body["max_tokens"]:
            body["max_tokens"] = left
            return True
        return False
