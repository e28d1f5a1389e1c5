"""The Triton adapter: requests go to the vLLM backend of one or more Triton servers.

A server that goes away takes no request with it: what ran there runs on another, or, where none
is left, goes back to the queue (not counted as a death: nobody knows why it went), and the worker
waits for a server before it takes more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import orjson

from contract.errors import EngineDead, RequestFailed, RequestRejected
from contract.openai.body import GENERATING
from contract.settings import SettingsError
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.end import close_on
from worker.engine.triton.request import (
    ELSEWHERE,
    Answer,
    Prompt,
    Prompts,
    ServerAway,
    ServerRefused,
    check_fields,
    respond,
    sampling,
)
from worker.engine.triton.settings import TritonSettings

if TYPE_CHECKING:
    from worker.engine.triton.server import Server

log = logging.getLogger(__name__)

#: Parameters of config.pbtxt by which `python -m worker.triton` tells the workers what
#: model.json says: Triton shows that file to nobody.
SLOTS_PARAMETER, LENGTH_PARAMETER = "WARMQ_MAX_NUM_SEQS", "WARMQ_MAX_MODEL_LEN"
DEFAULT_SLOTS = 64
ASK_EVERY_S = 0.5
#: A request is not moved for ever from server to server.
MOST_SERVERS = 8
#: What vLLM says of a prompt that does not fit, and the backend of parameters it cannot read.
TOO_LONG = ("maximum model length", "maximum context length", "longer than the maximum")
UNREADABLE = "'NoneType' object has no attribute 'lora_name'"


class TritonEngine:
    """Any number of Triton servers that serve one model."""

    grace_s = 0.0

    def __init__(self, settings: TritonSettings) -> None:
        self._model = str(settings.model)
        self._name = settings.triton_model
        self._served = settings.served_model_name or settings.triton_model
        self._addresses = [one.strip() for one in settings.triton_url.split(",") if one.strip()]
        self._slots = settings.triton_slots
        self._wait_s = settings.triton_wait_s
        self._default_max_tokens = settings.default_max_tokens
        self._max_model_len: int | None = None
        self._prompts: Prompts
        self._connect: Callable[[str, str], Server]
        self._servers: Sequence[Server] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        # One thread: templating a long prompt must not stop the drain's loop, and tokenizers
        # are not made for several.
        self._templating = ThreadPoolExecutor(1, thread_name_prefix="templates")

    def build(self) -> None:
        """Load the tokenizer and the client library."""
        try:
            from worker.engine.triton.server import Server

            self._connect = Server
            self._prompts = Prompts(self._model)
        except ImportError as error:
            raise SettingsError(
                f"WARMQ_ENGINE=triton: {error}; install what it needs: scripts/setup base build "
                "triton, or pip install 'warmq[triton]'"
            ) from error
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"WARMQ_MODEL: no tokenizer in {self._model}: {error}; chats are templated here, "
                "so name a folder with the model's tokenizer files"
            ) from error

    async def start(self) -> Capacity:
        """Wait until a server is ready.

        Raises:
            EngineDead: none became so within WARMQ_TRITON_WAIT_S.
            SettingsError: what it serves is no vLLM model.
        """
        self._loop = asyncio.get_running_loop()
        self._servers = [self._connect(address, self._name) for address in self._addresses]
        names, parameters = await self._first_ready()
        if "text_input" not in names:
            raise SettingsError(
                f"WARMQ_TRITON_MODEL: {self._name} has the inputs {sorted(names)} and not the vLLM "
                "backend's; name a model of that backend"
            )
        slots = self._slots or _number(parameters, SLOTS_PARAMETER) or DEFAULT_SLOTS
        self._max_model_len = _number(parameters, LENGTH_PARAMETER)
        self._watching = asyncio.create_task(self._watch())
        return Capacity(
            max_num_seqs=slots * len(self._servers),
            max_model_len=self._max_model_len or 0,
            model=self._name,
            details={"engine": "triton", "servers": self._addresses, "slots_each": slots},
        )

    async def _first_ready(self) -> tuple[set[str], dict[str, str]]:
        deadline = time.monotonic() + self._wait_s
        log.info("waiting for %s", self._addresses, extra={"action": "triton_wait"})
        while True:
            described = await asyncio.gather(*(self._look_at(one) for one in self._servers))
            for found in described:
                if found is not None:
                    return found
            if time.monotonic() > deadline:
                raise EngineDead(f"no Triton server is ready: {self._why()}", inside=False)
            await asyncio.sleep(ASK_EVERY_S)

    async def _look_at(self, server: Server) -> tuple[set[str], dict[str, str]] | None:
        """Ask for its health; return what it serves if it is new or was away, else None."""
        was = server.up
        if await server.ask() and not was:
            log.info("%s is ready", server.address, extra={"action": "triton_ready"})
            return await server.describe()
        return None

    async def _watch(self) -> None:
        """Ask every server for its health, so that one that is back gets requests again."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            await asyncio.gather(*(self._look_at(server) for server in self._servers))

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request on the least busy server; on another if that one goes away."""
        if request.url not in GENERATING:
            raise RequestRejected(
                f"field url: Triton's vLLM backend does not serve {request.url}; {ELSEWHERE}",
                code="unknown_url",
                field="url",
            )
        check_fields(request.body)
        loop = asyncio.get_running_loop()
        prompt, parameters = await loop.run_in_executor(self._templating, self._prepare, request)
        for _ in range(MOST_SERVERS):
            ready = [server for server in self._servers if server.up]
            if not ready:
                raise EngineDead(f"no Triton server is left: {self._why()}", inside=False)
            server = min(ready, key=lambda one: one.in_flight)
            answer = await self._run(server, prompt.text, parameters, request_id)
            if answer is not None:
                return self._complete(request, request_id, prompt, parameters, answer)
        raise RequestFailed(f"{MOST_SERVERS} servers in a row went away while they ran it")

    def text_so_far(self, request_id: str) -> Sequence[str]:
        """Return what came of an answer; its last character may still lack bytes."""
        pieces = (server.pieces.get(request_id) for server in self._servers)
        return [b"".join(found).decode(errors="ignore") for found in pieces if found]

    def _prepare(self, request: EngineRequest) -> tuple[Prompt, dict[str, Any]]:
        prompt = self._prompts.prompt_of(request)
        return prompt, sampling(
            request.body, prompt.tokens, self._prompts.defaults,
            self._default_max_tokens, self._max_model_len,
        )  # fmt: skip

    async def _run(
        self, server: Server, prompt: str, parameters: dict[str, Any], request_id: str
    ) -> Answer | None:
        try:
            return await server.run(prompt, orjson.dumps(parameters), request_id)
        except ServerAway as error:
            log.debug("%s runs elsewhere: %s", request_id, error)
            return None
        except ServerRefused as error:
            raise _refused(str(error)) from error

    def _complete(
        self,
        request: EngineRequest,
        request_id: str,
        prompt: Prompt,
        parameters: dict[str, Any],
        answer: Answer,
    ) -> Completion:
        written, limit = answer.completion_tokens, parameters["max_tokens"]
        if written is None:
            written = self._prompts.count(answer.text)
        reason = answer.finish_reason or ("length" if written >= limit else "stop")
        asked = prompt.tokens if answer.prompt_tokens is None else answer.prompt_tokens
        body = respond(request, request_id, self._served, answer.text, (reason, asked, written))
        return Completion(body, asked, written)

    def _why(self) -> str:
        return "; ".join(f"{server.address}: {server.why}" for server in self._servers)

    def dead(self) -> bool:
        """Whether no server is ready."""
        return not any(server.up for server in self._servers)

    def last_progress(self) -> float:
        """Return when the slowest of the busy servers last sent anything."""
        busy = [server.progress for server in self._servers if server.in_flight]
        return min(busy, default=time.monotonic())

    def kill(self) -> None:
        """Break off everything on the servers that send nothing; they rest for a minute."""
        latest = self.last_progress()
        for server in self._servers:
            if server.in_flight and server.progress <= latest:
                server.drop_calls()

    def shutdown(self) -> None:
        """Close the connections, which cancels what runs in the servers."""
        self._templating.shutdown(wait=False, cancel_futures=True)
        if self._loop is not None:
            close_on(self._loop, self._close())

    async def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(server.close() for server in self._servers))


def _number(parameters: dict[str, str], name: str) -> int | None:
    value = parameters.get(name, "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def _refused(message: str) -> Exception:
    if any(words in message for words in TOO_LONG):
        return RequestRejected(message, code="context_length_exceeded")
    if UNREADABLE in message:
        return RequestRejected(
            "the server's vLLM refuses these sampling parameters, and tells why in its log only; "
            "leave out those that are newer than its release"
        )
    return RequestFailed(message)
