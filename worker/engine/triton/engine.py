"""Requests in flight at the vLLM backend of Triton servers.

A server that goes away takes no request with it: what ran there runs on another, or, where none
is left, goes back to the queue. No death is counted, for nobody knows why the server went. Which
server gets a request, and when one is away, is worker/engine/remote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from contract.errors import RequestFailed, RequestRejected
from contract.openai.body import GENERATING
from contract.settings import SettingsError
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.remote import RemoteEngine, ask_once
from worker.engine.triton import TritonSettings
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
from worker.machine.finding import Refused, refuse_fatal
from worker.machine.model_folder import TOKENIZERS, judge_model

if TYPE_CHECKING:
    from worker.engine.triton.server import TritonServer

#: Parameters of config.pbtxt by which `python -m worker.triton` tells the workers what
#: model.json says: Triton shows that file to nobody.
SLOTS_PARAMETER, LENGTH_PARAMETER = "WARMQ_MAX_NUM_SEQS", "WARMQ_MAX_MODEL_LEN"
DEFAULT_SLOTS = 64
#: A request is not moved for ever from server to server.
MOST_SERVERS = 8
#: What vLLM says of a prompt that does not fit, and the backend of parameters it cannot read.
TOO_LONG = ("maximum model length", "maximum context length", "longer than the maximum")
UNREADABLE = "'NoneType' object has no attribute 'lora_name'"
#: What the backend writes before the words of its vLLM, which refuses most requests for good; and
#: what these say where a server that is well may take the same request later.
VLLM_SAYS = "Error generating stream: "
PASSES = (
    "memory", "timed out", "timeout", "temporarily", "try again", "overload",
    "too many requests", "connection", "internal server error", "cancel",
)  # fmt: skip


class TritonEngine(RemoteEngine["TritonServer"]):
    """The adapter for any number of servers that serve one model."""

    def __init__(self, settings: TritonSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._max_model_len: int | None = None
        self._prompts: Prompts
        self._connect: Callable[[str, str], TritonServer]
        # One thread: templating a long prompt must not stop the drain's loop, and tokenizers
        # are not made for several.
        self._templating = ThreadPoolExecutor(1, thread_name_prefix="templates")

    def build(self) -> None:
        """Load the tokenizer and the client library."""
        refuse_fatal(judge_model(str(self._settings.model), holds=TOKENIZERS, ask_hub=True))
        try:
            from worker.engine.triton.server import TritonServer

            self._connect = TritonServer
            self._prompts = Prompts(str(self._settings.model))
        except ImportError as error:
            raise SettingsError(
                f"WARMQ_ENGINE=triton: {error}; install what it needs: scripts/setup base build "
                "triton, or pip install 'warmq[triton]'"
            ) from error
        except Refused:
            raise
        except Exception as error:  # a broken file raises whatever transformers meets in it
            raise SettingsError(
                f"WARMQ_MODEL: no tokenizer in {self._settings.model}: {error}; chats are "
                "templated here, so name a folder with the model's tokenizer files"
            ) from error

    async def start(self) -> Capacity:
        """Wait until a server is ready.

        Raises:
            EngineDead: none became so within WARMQ_REMOTE_WAIT_S.
            SettingsError: what they serve is no vLLM model.
        """
        self._loop, settings = asyncio.get_running_loop(), self._settings
        addresses = [one.strip() for one in settings.triton_url.split(",") if one.strip()]
        first = await self._fleet.start(
            [self._connect(address, settings.triton_model) for address in addresses]
        )
        slots = _number(first.parameters, SLOTS_PARAMETER) or DEFAULT_SLOTS
        self._max_model_len = _number(first.parameters, LENGTH_PARAMETER)
        return Capacity(
            max_num_seqs=slots * len(addresses),
            max_model_len=self._max_model_len or 0,
            model=settings.triton_model,
            details={"engine": "triton", "servers": self._fleet.shown, "slots_each": slots},
        )

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request on the least busy server; on another if that one goes away.

        Raises:
            RequestRejected, RequestFailed: what the server answered.
            EngineDead: no server is left.
        """
        if request.url not in GENERATING:
            raise RequestRejected(
                f"field url: Triton's vLLM backend does not serve {request.url}; {ELSEWHERE}",
                code="unknown_url",
                field="url",
            )
        check_fields(request.body)
        loop = asyncio.get_running_loop()
        prompt, parameters = await loop.run_in_executor(self._templating, self._prepare, request)
        raw, limit = orjson.dumps(parameters), parameters["max_tokens"]
        for _ in range(MOST_SERVERS):
            server = await self._fleet.take()
            try:
                answer = await server.run(prompt.text, raw, request_id)
                if answer.finish_reason == "error":
                    raise _ended_in_error(parameters)
                return self._complete(request, request_id, prompt, limit, answer)
            except ServerAway as error:
                self._fleet.down(server, str(error))
            except ServerRefused as error:
                await self._fleet.ask(server)
                if server.up:
                    raise _refused(str(error)) from error
            finally:
                self._fleet.give(server)
        raise RequestFailed(f"{MOST_SERVERS} servers in a row went away while they ran it")

    def text_so_far(self, request_id: str) -> Sequence[str]:
        """Return what came of an answer; its last character may still lack bytes."""
        pieces = (server.pieces.get(request_id) for server in self._fleet.servers)
        return [b"".join(found).decode(errors="ignore") for found in pieces if found]

    def _prepare(self, request: EngineRequest) -> tuple[Prompt, dict[str, Any]]:
        prompt = self._prompts.prompt_of(request)
        return prompt, sampling(
            request.body,
            prompt.tokens,
            self._prompts.defaults,
            self._settings.default_max_tokens,
            self._max_model_len,
        )

    def _complete(
        self, request: EngineRequest, request_id: str, prompt: Prompt, limit: int, answer: Answer
    ) -> Completion:
        """Add what the backend did not tell: numbers of tokens, and why the answer ended."""
        written, asked = answer.completion_tokens, answer.prompt_tokens
        written = len(self._prompts.ids(answer.text)) if written is None else written
        asked = prompt.tokens if asked is None else asked
        reason = answer.finish_reason or ("length" if written >= limit else "stop")
        served = self._settings.served_model_name or self._settings.triton_model
        body = respond(request, request_id, served, answer.text, (reason, asked, written))
        return Completion(body, asked, written)

    def shutdown(self) -> None:
        """Close the connections, which cancels what runs in the servers."""
        self._templating.shutdown(wait=False, cancel_futures=True)
        super().shutdown()


rehearse = partial(ask_once, TritonEngine)


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
    _, told, words = message.partition(VLLM_SAYS)
    words = words.strip()
    if told and words and not any(one in words.lower() for one in PASSES):
        return RequestRejected(words)
    return RequestFailed(message)


def _ended_in_error(parameters: dict[str, Any]) -> Exception:
    """Return the error of an answer that has the finish_reason `error`: vLLM gives it also to what
    comes of a constraint that no text fulfils."""
    if "structured_outputs" in parameters:
        return RequestRejected(
            "the server's vLLM ended the answer with finish_reason error: it cannot follow the "
            "schema, regex, choice or grammar; its log says why"
        )
    return RequestFailed("the server's vLLM ended the answer with finish_reason error")
