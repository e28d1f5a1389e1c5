"""Runs requests at Triton servers with vLLM's backend.

If a server fails, its requests run on another one, or return to the queue if no server is left. No
death is counted against the requests, because the cause is unknown. worker/engine/remote chooses
the server for a request.
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
    ServerDown,
    ServerRefused,
    check_fields,
    respond,
    sampling,
)
from worker.machine.finding import Refused, refuse_fatal
from worker.machine.model_folder import TOKENIZERS, check_model

if TYPE_CHECKING:
    from worker.engine.triton.server import TritonServer

#: Parameters of config.pbtxt that `python -m worker.triton` copies from model.json: the number of
#: slots and the context length. Triton does not show model.json itself to clients.
SLOTS_PARAMETER, LENGTH_PARAMETER = "WARMQ_MAX_NUM_SEQS", "WARMQ_MAX_MODEL_LEN"
#: Slots of each server if config.pbtxt does not name them.
DEFAULT_SLOTS = 64
#: Number of servers that may go down while they run a request, before the request fails.
MOST_SERVERS = 8
#: Parts of vLLM's error text for a prompt that is too long.
TOO_LONG = ("maximum model length", "maximum context length", "longer than the maximum")
#: Part of the backend's error text for parameters that it cannot read.
UNREADABLE = "'NoneType' object has no attribute 'lora_name'"
#: The backend's text before an error text of vLLM. Most of these errors refuse the request.
VLLM_PREFIX = "Error generating stream: "
#: Parts of vLLM's error texts for temporary problems, which do not refuse the request.
TEMPORARY = (
    "memory", "timed out", "timeout", "temporarily", "try again", "overload",
    "too many requests", "connection", "internal server error", "cancel",
)  # fmt: skip


class TritonEngine(RemoteEngine["TritonServer"]):
    """The triton engine, with any number of servers that serve one model."""

    def __init__(self, settings: TritonSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._max_model_len: int | None = None
        self._prompts: Prompts
        self._connect: Callable[[str, str], TritonServer]
        # A separate thread, so that a long prompt does not block the drain's loop. Only one,
        # because tokenizers are not thread-safe.
        self._templating = ThreadPoolExecutor(1, thread_name_prefix="templates")

    def build(self) -> None:
        """Load the tokenizer and the client library."""
        refuse_fatal(check_model(str(self._settings.model), holds=TOKENIZERS, ask_hub=True))
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
        except Exception as error:  # transformers raises any exception for a broken file
            raise SettingsError(
                f"WARMQ_MODEL: no tokenizer in {self._settings.model}: {error}; the worker "
                "templates chats, so name a folder with the model's tokenizer files"
            ) from error

    async def start(self) -> Capacity:
        """Wait until a server is ready, and return the engine's capacity.

        Raises:
            EngineDead: no server became ready within WARMQ_REMOTE_WAIT_S.
            SettingsError: the servers' model does not use the vLLM backend.
        """
        self._loop, settings = asyncio.get_running_loop(), self._settings
        first = await self._servers.start(
            [self._connect(address, settings.triton_model) for address in settings.addresses]
        )
        slots = _number(first.parameters, SLOTS_PARAMETER) or DEFAULT_SLOTS
        self._max_model_len = _number(first.parameters, LENGTH_PARAMETER)
        return Capacity(
            max_num_seqs=slots * len(settings.addresses),
            max_model_len=self._max_model_len or 0,
            model=settings.triton_model,
            details={"engine": "triton", "servers": self._servers.shown, "slots_each": slots},
        )

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request on the least busy server, or on another if that one fails.

        Raises:
            RequestRejected, RequestFailed: the server answered with an error.
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
            server = await self._servers.take()
            try:
                answer = await server.run(prompt.text, raw, request_id)
                if answer.finish_reason == "error":
                    raise _ended_in_error(parameters)
                return self._complete(request, request_id, prompt, limit, answer)
            except ServerDown as error:
                self._servers.down(server, str(error))
            except ServerRefused as error:
                await self._servers.ask(server)
                if server.up:
                    raise _error_for(str(error)) from error
            finally:
                self._servers.give(server)
        raise RequestFailed(f"{MOST_SERVERS} servers in a row went down while they ran the request")

    def text_so_far(self, request_id: str) -> Sequence[str]:
        """Return the answer's text so far, without an incomplete character at its end."""
        pieces = (server.pieces.get(request_id) for server in self._servers.servers)
        return [b"".join(parts).decode(errors="ignore") for parts in pieces if parts]

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
        """Build the answer. Counts tokens, and infers finish_reason, if the server sends none."""
        completion_tokens, prompt_tokens = answer.completion_tokens, answer.prompt_tokens
        completion_tokens = (
            len(self._prompts.ids(answer.text)) if completion_tokens is None else completion_tokens
        )
        prompt_tokens = prompt.tokens if prompt_tokens is None else prompt_tokens
        reason = answer.finish_reason or ("length" if completion_tokens >= limit else "stop")
        served = self._settings.served_model_name or self._settings.triton_model
        body = respond(
            request, request_id, served, answer.text, (reason, prompt_tokens, completion_tokens)
        )
        return Completion(body, prompt_tokens, completion_tokens)

    def shutdown(self) -> None:
        """Close the connections; Triton then cancels their requests."""
        self._templating.shutdown(wait=False, cancel_futures=True)
        super().shutdown()


#: Used by `python -m worker.check`: connects to each server once, without waiting.
dry_run = partial(ask_once, TritonEngine)


def _number(parameters: dict[str, str], name: str) -> int | None:
    value = parameters.get(name, "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def _error_for(message: str) -> Exception:
    if any(words in message for words in TOO_LONG):
        return RequestRejected(message, code="context_length_exceeded")
    if UNREADABLE in message:
        return RequestRejected(
            "the server's vLLM refuses these sampling parameters, with the reason in its log only; "
            "leave out those that are newer than its release"
        )
    text = message.partition(VLLM_PREFIX)[2].strip()
    if text and not any(words in text.lower() for words in TEMPORARY):
        return RequestRejected(text)
    return RequestFailed(message)


def _ended_in_error(parameters: dict[str, Any]) -> Exception:
    """Return the error for finish_reason `error`, which vLLM also sends if no text is allowed."""
    message = "the server's vLLM ended the answer with finish_reason error"
    if "structured_outputs" not in parameters:
        return RequestFailed(message)
    return RequestRejected(
        f"{message}: it cannot follow the schema, regex, choice or grammar; its log has the reason"
    )
