"""Sends requests to one Triton server over gRPC. Only this module imports tritonclient.

The server's model must use the vLLM backend. It has the inputs `text_input`, `stream`,
`sampling_parameters` and `exclude_input_in_output`, and answers in pieces of `text_output`.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from worker.engine.remote.servers import Health, Interrupted, Report, Server
from worker.engine.triton.request import Answer, ServerDown, ServerRefused

#: Seconds in which a server has to answer a request for its health or configuration.
ASK_S = 5.0
#: Inputs that newer backends have. Without them the worker counts tokens and infers finish_reason.
EXTRAS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
#: Options of the gRPC channel. By default gRPC waits up to two minutes before it connects again.
CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
#: Parts of error texts of a backend whose engine has ended. Other errors are caused by the request.
ENGINE_GONE = ("Stub process", "EngineCore", "EngineDead", "unhealthy vLLM engine", "unknown model",
        "Request was cancelled", "is not ready", "unloading", "shutting down")  # fmt: skip


class TritonServer(Server):
    """One Triton server.

    `parameters` are those of its config.pbtxt, `extras` the inputs of EXTRAS that its model has.
    `pieces` has the parts of each unfinished answer, by request id.
    """

    def __init__(self, address: str, model: str) -> None:
        super().__init__(address)
        self.model = model
        self.extras: tuple[str, ...] = ()
        self.parameters: dict[str, str] = {}
        self.pieces: dict[str, list[bytes]] = {}
        self._client = InferenceServerClient(
            address.removeprefix("grpcs://").removeprefix("grpc://"),
            ssl=address.startswith("grpcs://"),
            channel_args=CHANNEL,
        )

    async def ask(self) -> Report:
        """Check that the model is ready; if the server was down, also read the model's inputs."""
        try:
            if not await self._client.is_model_ready(self.model, client_timeout=ASK_S):
                return Report(Health.ILL, f"model {self.model!r} is not ready")
            return Report(Health.WELL) if self.up else await self._read_config()
        except (InferenceServerException, grpc.RpcError) as error:
            late = "DEADLINE_EXCEEDED" in str(error)
            return Report(Health.SILENT if late else Health.ILL, str(error))

    async def _read_config(self) -> Report:
        reply = await self._client.get_model_config(self.model, client_timeout=ASK_S)
        names = {one.name for one in reply.config.input}
        self.extras = tuple(name for name in EXTRAS if name in names)
        self.parameters = {key: one.string_value for key, one in reply.config.parameters.items()}
        if "text_input" in names:
            return Report(Health.WELL)
        return Report(
            Health.UNUSABLE,
            f"{self.model} has the inputs {sorted(names)} instead of the vLLM backend's; name a "
            "model of that backend in WARMQ_TRITON_MODEL",
        )

    async def run(self, prompt: str, parameters: bytes, request_id: str) -> Answer:
        """Run one request; cancelling cancels it at the server.

        Raises:
            ServerDown, ServerRefused: the server did not finish, or answered with an error.
        """
        call = self._client.stream_infer(_stream_of(self._request(prompt, parameters, request_id)))
        try:
            async with self.running():
                return await self._read(call, self.pieces.setdefault(request_id, []))
        except Interrupted as error:
            raise ServerDown(str(error)) from error
        except grpc.RpcError as error:
            why = error.details() if hasattr(error, "details") else error
            raise ServerDown(str(why)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ServerDown("its connection was closed") from None
        finally:
            call.cancel()
            self.pieces.pop(request_id, None)

    async def _read(self, call: Any, pieces: list[bytes]) -> Answer:
        answer = Answer()
        async for result, error in call:
            self.progress()
            if error is not None:
                is_engine_gone = any(words in str(error) for words in ENGINE_GONE)
                raise ServerDown(str(error)) if is_engine_gone else ServerRefused(str(error))
            text = result.as_numpy("text_output")
            if text is not None:
                pieces.append(text[0])
                self._note(answer, result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                if answer.finish_reason == "abort":
                    raise ServerDown("its engine was shut down")
                answer.text = b"".join(pieces).decode(errors="replace")
                return answer
        raise ServerDown("it ended a stream before the end of the answer")

    def _note(self, answer: Answer, result: Any) -> None:
        reason, prompt, written = (
            result.as_numpy(name.removeprefix("return_")) if name in self.extras else None
            for name in EXTRAS
        )
        if reason is not None and reason[0] != b"None":
            answer.finish_reason = reason[0].decode()
        if prompt is not None:
            answer.prompt_tokens = int(prompt.flat[0])
        if written is not None:
            answer.completion_tokens = (answer.completion_tokens or 0) + int(written.flat[0])

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
        """Close the connection; Triton then cancels its requests."""
        await self._client.close()


async def _stream_of(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _input(name: str, kind: str, values: Any) -> Any:
    tensor = InferInput(name, [len(values)], kind)
    tensor.set_data_from_numpy(values)
    return tensor
