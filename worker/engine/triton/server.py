"""One Triton server over gRPC: the only file that knows tritonclient.

The model behind it is the vLLM backend's: a decoupled one that takes `text_input`, `stream`,
`sampling_parameters` and `exclude_input_in_output` and answers with pieces of `text_output`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from worker.engine.triton.request import Answer, ServerAway, ServerRefused

log = logging.getLogger(__name__)

#: How long a question about health or configuration may take.
ASK_S = 5.0
#: After a failure a server is asked again so soon; one that hung looks healthy, and rests longer.
RETRY_S = 0.5
REST_S = 60.0
#: Inputs that newer backends have; without them tokens are counted and the ending is inferred here.
EXTRAS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
#: gRPC would try again after up to two minutes, however often the server is asked.
CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
#: Texts with which a backend says that its engine, and not the request, is at fault.
SICK = ("Stub process", "EngineCore", "EngineDead", "unhealthy vLLM engine", "unknown model",
        "Request was cancelled", "is not ready", "unloading", "shutting down")  # fmt: skip


class Server:
    """`up` is what the latest question or request showed; times are time.monotonic()."""

    def __init__(self, address: str, model: str) -> None:
        self.address = address
        self.model = model
        self.up = False
        self.why = "not asked yet"
        self.in_flight = 0
        self.progress = time.monotonic()
        self.extras: tuple[str, ...] = ()
        self._retry_at = 0.0
        self._calls: set[Any] = set()
        #: The pieces so far of each answer that runs, by request id.
        self.pieces: dict[str, list[bytes]] = {}
        tls = address.startswith("grpcs://")
        self._client = InferenceServerClient(
            address.removeprefix("grpcs://").removeprefix("grpc://"),
            ssl=tls,
            channel_args=CHANNEL,
        )

    async def ask(self) -> bool:
        """Find out whether server and model are ready; False also while it rests."""
        if time.monotonic() < self._retry_at:
            return self.up
        try:
            if await self._client.is_model_ready(self.model, client_timeout=ASK_S):
                self.up = True
            else:
                self.failed(f"model {self.model!r} is not ready")
        except (InferenceServerException, grpc.RpcError) as error:
            # A busy server may answer late; only one that was away has to prove itself.
            if not (self.up and "DEADLINE_EXCEEDED" in str(error)):
                self.failed(str(error))
        return self.up

    async def describe(self) -> tuple[set[str], dict[str, str]] | None:
        """Return the model's input names and the parameters of its config.pbtxt, None if away."""
        try:
            reply = await self._client.get_model_config(self.model, client_timeout=ASK_S)
        except (InferenceServerException, grpc.RpcError) as error:
            self.failed(str(error))
            return None
        names = {one.name for one in reply.config.input}
        self.extras = tuple(name for name in EXTRAS if name in names)
        parameters = {key: one.string_value for key, one in reply.config.parameters.items()}
        return names, parameters

    def failed(self, why: str, rest_s: float = RETRY_S) -> None:
        """Take no requests for a while."""
        if self.up:
            log.warning("%s is away: %s", self.address, why, extra={"action": "triton_away"})
        self.up, self.why = False, why
        self._retry_at = time.monotonic() + rest_s

    def drop_calls(self) -> None:
        """Break off everything that runs; each request then meets ServerAway."""
        self.failed("it made no progress", REST_S)
        for call in list(self._calls):
            call.cancel()

    async def run(self, prompt: str, parameters: bytes, request_id: str) -> Answer:
        """Run one request; cancelling the task cancels it in the server.

        Raises:
            ServerAway, ServerRefused: it did not end.
        """
        if self.in_flight == 0:
            self.progress = time.monotonic()
        asked = self._request(prompt, parameters, request_id)
        call = self._client.stream_infer(_once(asked))
        self._calls.add(call)
        self.in_flight += 1
        try:
            return await self._read(call, self.pieces.setdefault(request_id, []))
        except grpc.RpcError as error:
            self.failed(str(error.details() if hasattr(error, "details") else error))
            raise ServerAway(f"{self.address}: {self.why}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ServerAway(f"{self.address}: {self.why}") from None
        finally:
            call.cancel()
            self._calls.discard(call)
            self.pieces.pop(request_id, None)
            self.in_flight -= 1

    async def _read(self, call: Any, pieces: list[bytes]) -> Answer:
        answer = Answer()
        async for result, error in call:
            self.progress = time.monotonic()
            if error is not None:
                raise await self._judge(str(error))
            text = result.as_numpy("text_output")
            if text is not None:
                pieces.append(text[0])
                self._note(answer, result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                if answer.finish_reason == "abort":  # its vLLM was told to end and gave this up
                    self.failed("its engine was told to end")
                    raise ServerAway(f"{self.address}: {self.why}")
                answer.text = b"".join(pieces).decode(errors="replace")
                return answer
        self.failed("it ended a stream before the answer was whole")
        raise ServerAway(f"{self.address}: {self.why}")

    def _note(self, answer: Answer, result: Any) -> None:
        reason = result.as_numpy("finish_reason") if EXTRAS[0] in self.extras else None
        if reason is not None and reason[0] != b"None":
            answer.finish_reason = reason[0].decode()
        prompt = result.as_numpy("num_input_tokens") if EXTRAS[1] in self.extras else None
        if prompt is not None:
            answer.prompt_tokens = int(prompt.flat[0])
        new = result.as_numpy("num_output_tokens") if EXTRAS[2] in self.extras else None
        if new is not None:
            answer.completion_tokens = (answer.completion_tokens or 0) + int(new.flat[0])

    async def _judge(self, message: str) -> Exception:
        """Tell a wrong request from a server whose engine is gone."""
        if any(word in message for word in SICK):
            self.failed(message)
        elif self.up:
            await self.ask()
        if self.up:
            return ServerRefused(message)
        return ServerAway(f"{self.address}: {message}")

    def _request(self, prompt: str, parameters: bytes, request_id: str) -> dict[str, Any]:
        flags = ["stream", "exclude_input_in_output", *self.extras]
        return {
            "model_name": self.model,
            "request_id": request_id,
            "inputs": [
                _input("text_input", "BYTES", np.array([prompt.encode()], dtype=np.object_)),
                _input("sampling_parameters", "BYTES", np.array([parameters], dtype=np.object_)),
                *(_input(name, "BOOL", np.array([True])) for name in flags),
            ],
        }

    async def close(self) -> None:
        """Cancel what runs and close the connection."""
        for call in list(self._calls):
            call.cancel()
        await self._client.close()


async def _once(asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield asked


def _input(name: str, kind: str, values: Any) -> Any:
    tensor = InferInput(name, [len(values)], kind)
    tensor.set_data_from_numpy(values)
    return tensor
