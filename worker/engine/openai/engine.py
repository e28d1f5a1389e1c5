"""Runs requests at one or more servers with OpenAI's API.

A server that is down is not a dead engine: its requests return to the queue, no death is counted
against them, and the next engine's `start` waits until a server is healthy. retries.py lists the
action for each fault, breaker.py and blame.py decide who is at fault, and worker/engine/remote
chooses the server for a request.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import aiohttp
import orjson

from contract.errors import EngineDead
from contract.openai.amounts import sequences_of
from contract.openai.body import CHAT_URL, COUNTING, LIMITS, limits_tokens
from contract.redis.client import AsyncClient
from contract.redis.connect import connect_async
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.openai import OpenAISettings
from worker.engine.openai.blame import Blame, Tries
from worker.engine.openai.exchange import exchange, prompt_tokens
from worker.engine.openai.guard import Guard
from worker.engine.openai.metrics import CEILING
from worker.engine.openai.reassembly import Reassembly
from worker.engine.openai.retries import TOO_LONG, Action, Unanswered
from worker.engine.openai.server_share import ANSWER_S, ServerShare
from worker.engine.openai.shared import Sharing, priority
from worker.engine.openai.upstream import Upstream
from worker.engine.remote import RemoteEngine, ask_once
from worker.engine.remote.servers import Health

log = logging.getLogger(__name__)

#: Seconds that an idle connection is kept. uvicorn closes idle connections after 5 s, and a request
#: sent at that moment would be lost.
KEEP_ALIVE_S = 3.0
#: Seconds in which a connection has to be made.
CONNECT_S = 10.0
Json = dict[str, Any]


class OpenAIEngine(RemoteEngine[Upstream]):
    """The openai engine, with one or more servers."""

    def __init__(self, settings: OpenAISettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._slots = (settings.openai_concurrency or CEILING) * len(settings.base_urls)
        self._max_model_len = 0
        self._session: aiohttp.ClientSession | None = None
        self._partial: dict[str, Reassembly] = {}
        self._blame = Blame(self._servers)
        self._sharing: list[Sharing] = []
        #: The client with which workers share a server that people use.
        self._redis: AsyncClient | None = None

    async def start(self) -> Capacity:
        """Wait until a server is healthy.

        Raises:
            SettingsError: no server accepts the key, or none serves the model.
            EngineDead: no server became healthy within WARMQ_REMOTE_WAIT_S.
        """
        self._loop, settings = asyncio.get_running_loop(), self._settings
        key = settings.openai_api_key.get_secret_value()
        self._session = session = aiohttp.ClientSession(
            # Connections for all requests in flight, and for health checks.
            connector=aiohttp.TCPConnector(
                limit=self._slots + 4 * len(settings.base_urls), keepalive_timeout=KEEP_ALIVE_S
            ),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # An answer may take any time; `_servers` ends requests that make no progress.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        people = settings.openai_shared_with != "nobody"
        limit = None if people else settings.openai_concurrency
        options = settings.model, limit, settings.openai_health_path, settings.known_answers > 0
        servers = [Upstream(url, session, *options) for url in settings.base_urls]
        if people:
            self._share(servers)
        upstream = await self._servers.start(servers)
        served = upstream.models.get(upstream.model, {})
        self._max_model_len = _listed_length(served.get("max_model_len"))
        return Capacity(
            max_num_seqs=self._slots,
            max_model_len=self._max_model_len,
            model=upstream.model,
            details={
                "engine": "openai",
                "servers": self._servers.shown,
                "served_names": sorted(upstream.models),
                "adaptive": settings.openai_concurrency is None,
            },
            identity=self._identity,
        )

    def _share(self, servers: Sequence[Upstream]) -> None:
        """Let the workers at each server share one limit, which follows what people feel."""
        settings = self._settings
        url = settings.redis_url.get_secret_value()
        self._redis = connect_async(url, "warmq-server-share", ANSWER_S)
        self._sharing = [
            Sharing(
                server,
                self._guard(),
                ServerShare(self._redis, server),
                self._servers,
                aborts=settings.openai_shared_with == "people-abort",
            )
            for server in servers
        ]

    def _identity(self) -> str:
        """Return the model's card of the servers; '' if theirs differ, or none lists the model."""
        known = [server for server in self._servers.servers if server.models]
        found = {server.identity for server in known if server.model in server.models}
        complete = len(known) == len(self._servers.servers)
        return found.pop() if complete and len(found) == 1 else ""

    def _guard(self) -> Guard:
        settings = self._settings
        ttft_ms, itl_ms = settings.openai_ttft_ms, settings.openai_itl_ms
        return Guard(
            settings.openai_concurrency or CEILING,
            ttft_ms and ttft_ms / 1000,
            itl_ms and itl_ms / 1000,
        )

    def last_progress(self) -> float:
        """Return the present time while the servers are watched, else the latest progress.

        The servers' watch ends stalled requests, so the drain must not rebuild the engine for them.
        """
        return super().last_progress() if self.dead() else time.monotonic()

    async def _close(self) -> None:
        await self._blame.close()
        for sharing in self._sharing:
            await sharing.close()
        if self._redis is not None:
            await self._redis.aclose()
        await super()._close()
        if self._session is not None:
            await self._session.close()

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request at a free server, and again elsewhere if retries.py allows it."""
        body = dict(request.body)
        tries = Tries(request_id, request.url, sequences_of(body))
        if not limits_tokens(request.url, body):
            body[LIMITS[request.url][0]] = self._settings.default_max_tokens
        added = priority(request.url, body) if self._sharing else {}
        # Each chunk of a stream would take the server's time, and people wait for it.
        streamed = request.listened or not self._sharing
        while True:
            upstream = await self._servers.take(tries.avoid)
            sent_at = time.monotonic()
            try:
                self._blame.count_failure(tries)
                any_name = self._settings.served_model_name is None
                keeps_name = any_name and body.get("model") in upstream.models
                sent = body if keeps_name else body | {"model": upstream.model}
                async with upstream.returnable():
                    answer = await exchange(
                        upstream, request.url, sent, request_id, self._partial, request.trace,
                        added, streamed=streamed or upstream.needs_streams,
                    )  # fmt: skip
                self._blame.answered(upstream, tries, sent_at)
                break
            except Unanswered as fault:
                streamed = True  # a proxy may have ended it because it sent nothing for long
                if await self._fits_now(upstream, request, body, fault):
                    continue
                await self._settle(upstream, fault, tries, sent_at)
            finally:
                upstream.breaker.left(sent_at)
                self._servers.give(upstream)
                self._partial.pop(request_id, None)
            await self._blame.pause(tries)
        if (model := request.body.get("model")) and request.url not in COUNTING:
            answer["model"] = model
        read, written = _token_counts(answer.get("usage") or {})
        upstream.written += written
        return Completion(orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS), read, written)

    def text_so_far(self, request_id: str) -> Sequence[str]:
        """Return the text of a streamed answer so far; empty if the answer is not streamed."""
        answer = self._partial.get(request_id)
        return answer.texts() if answer is not None else ()

    async def _settle(
        self, upstream: Upstream, fault: Unanswered, tries: Tries, sent_at: float
    ) -> None:
        """Act on a fault as the table in retries.py requires. Returns if the request is sent again.

        Raises:
            RequestRejected: the server refuses the request.
            EngineDead: no server is left, or a second server has died of this request.
        """
        action = self._blame.action(upstream, fault, tries)
        tries.avoid |= {upstream}
        if action is Action.REJECT:
            self._blame.answered(upstream, tries, sent_at, fault)
            raise fault.rejection()
        if action is Action.PROBE:
            resting = upstream.breaker.resting
            health = Health.WELL if resting else await self._servers.ask(upstream)
            action = fault.after_probe(health)
        elif fault.queue_full and tries.sequences == 1:
            upstream.queue_is_full(fault.wait_s)
            return
        elif action is Action.MOVE:
            self._servers.down(upstream, fault.message)
        if action is Action.DIED:
            tries.deaths += 1
        if tries.deaths > 1 or self._servers.dead:
            message = f"{upstream.name}: {fault.message}"
            raise EngineDead(message, inside=action is Action.DIED)
        if upstream.up:
            self._blame.failed(upstream, fault, tries, sent_at, asked=action is Action.WAIT)

    async def _fits_now(
        self, upstream: Upstream, request: EngineRequest, body: Json, fault: Unanswered
    ) -> bool:
        """Return whether a smaller or no max_tokens lets the request fit; change `body`.

        Only WARMQ_DEFAULT_MAX_TOKENS is reduced, never a max_tokens that the request names.
        """
        limit_is_ours = (
            request.body.get("max_tokens") is None and body.get("max_tokens") is not None
        )
        too_long = fault.rejection().code == TOO_LONG
        if (
            not (limit_is_ours and too_long and self._max_model_len)
            or fault.action() is not Action.REJECT
        ):
            return False
        if request.url == CHAT_URL:
            del body["max_tokens"]  # without it the server uses all that the context leaves
            return True
        prompt = await prompt_tokens(upstream, body | {"model": upstream.model})
        room = self._max_model_len - (prompt or self._max_model_len)
        if fits := bool(0 < room < body["max_tokens"]):
            body["max_tokens"] = room
        return fits


def _token_counts(usage: Json) -> tuple[int, int]:
    """Return the tokens of prompt and answer. Anthropic counts cached tokens separately."""
    cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
    prompt = sum(int(usage.get(name) or 0) for name in ("prompt_tokens", "input_tokens", *cached))
    output = sum(int(usage.get(name) or 0) for name in ("completion_tokens", "output_tokens"))
    return prompt, output


#: Used by `python -m worker.check`: connects to each server once, without waiting.
dry_run = partial(ask_once, OpenAIEngine)


def _listed_length(listed: object) -> int:
    """Return a server's max_model_len in tokens; 0 if the value is not a number."""
    try:
        return max(0, int(str(listed or 0)))
    except ValueError:
        log.warning(
            "a server lists max_model_len %r, which is not a number of tokens: it is ignored",
            listed,
            extra={"action": "max_model_len_ignored"},
        )
        return 0
