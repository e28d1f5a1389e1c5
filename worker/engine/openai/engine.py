"""Requests in flight at OpenAI-compatible servers: vLLM's own, or any other.

A server that is away is no engine that died: its requests go back to the queue, no death is
counted, and the next engine's `start` waits for a server. What becomes of each fault is a table
in retries.py; which server gets a request, and when one is away, is worker/engine/remote.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import orjson

from contract.errors import EngineDead, RequestFailed
from contract.openai.body import CHAT_URL, COUNTING, LIMITS, limits_tokens
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.openai import OpenAISettings
from worker.engine.openai.exchange import exchange, prompt_tokens
from worker.engine.openai.reassembly import Reassembly
from worker.engine.openai.retries import ATTEMPTS, TOO_LONG, Action, Unanswered
from worker.engine.openai.upstream import CEILING, KEY_REFUSED, Upstream
from worker.engine.remote import RemoteEngine, ask_once

log = logging.getLogger(__name__)

#: uvicorn closes idle connections after 5 s; a request sent on one just then is lost.
KEEP_ALIVE_S = 3.0
CONNECT_S = 10.0
#: Between attempts that may be the request's own fault, doubled each time.
BACKOFF_S = 0.25

Json = dict[str, Any]


@dataclass(slots=True)
class _Tries:
    """How often one request was tried: `faults` that may be its own, `deaths` of servers with it
    inside, and the servers to `avoid` because they did not answer it."""

    faults: int = 0
    deaths: int = 0
    avoid: frozenset[Upstream] = frozenset()


class OpenAIEngine(RemoteEngine[Upstream]):
    """The adapter for one or more servers."""

    def __init__(self, settings: OpenAISettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._slots = (settings.openai_concurrency or CEILING) * len(settings.base_urls)
        self._max_model_len = 0
        self._session: aiohttp.ClientSession | None = None
        self._partial: dict[str, Reassembly] = {}

    def build(self) -> None:
        """Nothing is loaded here."""

    async def start(self) -> Capacity:
        """Wait until a server is well.

        Raises:
            SettingsError: no server takes the key, or none serves the model.
            EngineDead: no server became well within WARMQ_REMOTE_WAIT_S.
        """
        self._loop, settings = asyncio.get_running_loop(), self._settings
        key = settings.openai_api_key.get_secret_value()
        self._session = session = aiohttp.ClientSession(
            # All that may be in flight, and the questions about health beside it.
            connector=aiohttp.TCPConnector(
                limit=self._slots + 4 * len(settings.base_urls), keepalive_timeout=KEEP_ALIVE_S
            ),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # How long an answer takes is not known, only how long it may stand still: the fleet
            # watches that.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        upstream = await self._fleet.start(
            [
                Upstream(url, session, settings.model, settings.openai_concurrency)
                for url in settings.base_urls
            ]
        )
        served = upstream.models.get(upstream.model, {})
        self._max_model_len = _length(served.get("max_model_len"))
        return Capacity(
            max_num_seqs=self._slots,
            max_model_len=self._max_model_len,
            model=upstream.model,
            details={
                "engine": "openai",
                "servers": self._fleet.shown,
                "served_names": sorted(upstream.models),
                "adaptive": settings.openai_concurrency is None,
            },
        )

    async def _close(self) -> None:
        await super()._close()
        if self._session is not None:
            await self._session.close()

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request at whichever server has room, again elsewhere if that one fails.

        Raises:
            RequestRejected, RequestFailed, EngineDead: by the table of retries.py.
        """
        body, tries = dict(request.body), _Tries()
        if not limits_tokens(request.url, body):
            body[LIMITS[request.url][0]] = self._settings.default_max_tokens
        while True:
            upstream = await self._fleet.take(tries.avoid)
            try:
                named = self._settings.served_model_name is None
                known = named and body.get("model") in upstream.models
                sent = body if known else body | {"model": upstream.model}  # the one it serves
                answer = await exchange(
                    upstream, request.url, sent, request_id, self._partial, request.trace
                )
                break
            except Unanswered as fault:
                if await self._fits_now(upstream, request, body, fault):
                    continue
                tries.avoid |= {upstream}
                pause_s = await self._settle(upstream, fault, tries)
            finally:
                self._fleet.give(upstream)
                self._partial.pop(request_id, None)
            await asyncio.sleep(pause_s)
        upstream.pause_s = 0.0
        if (model := request.body.get("model")) and request.url not in COUNTING:
            answer["model"] = model
        return Completion(
            orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS), *_used(answer.get("usage") or {})
        )

    def text_so_far(self, request_id: str) -> Sequence[str]:
        """Return what came of a streamed answer; nothing of one that is asked for at once."""
        answer = self._partial.get(request_id)
        return answer.texts() if answer is not None else ()

    async def _settle(self, upstream: Upstream, fault: Unanswered, tries: _Tries) -> float:
        """Do what the table says; return after how many seconds the request is sent again."""
        action, message = fault.action(), f"{upstream.name}: {fault.message}"
        if action is Action.PROBE:
            action = fault.after_probe(await self._fleet.ask(upstream))
        elif action in (Action.AWAY, Action.CLOSED):
            refused = action is Action.CLOSED
            self._fleet.down(upstream, KEY_REFUSED if refused else fault.message, unusable=refused)
        if action is Action.REJECT:
            raise fault.rejection()
        if action is Action.WAIT:
            upstream.pause(fault.wait_s)
            return 0.0
        if action is Action.COUNT:
            tries.faults += 1
            if tries.faults >= ATTEMPTS:
                raise RequestFailed(f"{message} ({ATTEMPTS} times)")
            return BACKOFF_S * 2.0**tries.faults
        if action is Action.DIED:
            tries.deaths += 1
        if tries.deaths > 1 or self._fleet.dead:
            raise EngineDead(message, inside=action is Action.DIED)
        return 0.0

    async def _fits_now(
        self, upstream: Upstream, request: EngineRequest, body: Json, fault: Unanswered
    ) -> bool:
        """If only our default max_tokens was too large, make it what the context leaves."""
        ours = request.body.get("max_tokens") is None and body.get("max_tokens") is not None
        too_long = fault.rejection().code == TOO_LONG
        if not (ours and too_long and self._max_model_len) or fault.action() != Action.REJECT:
            return False
        if request.url == CHAT_URL:
            del body["max_tokens"]  # the server then takes what is left, which is less
            return True
        longest = await prompt_tokens(upstream, body | {"model": upstream.model})
        left = self._max_model_len - (longest or self._max_model_len)
        if fits := bool(0 < left < body["max_tokens"]):
            body["max_tokens"] = left
        return fits


def _used(usage: Json) -> tuple[int, int]:
    """Return the tokens of prompt and answer, in OpenAI's older and newer words and Anthropic's,
    who counts those of the cache apart."""
    cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
    asked = sum(int(usage.get(name) or 0) for name in ("prompt_tokens", "input_tokens", *cached))
    written = sum(int(usage.get(name) or 0) for name in ("completion_tokens", "output_tokens"))
    return asked, written


rehearse = partial(ask_once, OpenAIEngine)


def _length(told: object) -> int:
    """Return what a server says of its model's longest sequence, in tokens; 0 for no number."""
    try:
        length = int(str(told or 0))
    except ValueError:
        log.warning(
            "a server tells max_model_len %r, which is no number of tokens: it is ignored", told,
            extra={"action": "max_model_len_ignored"},
        )  # fmt: skip
        return 0
    return max(0, length)
