"""What one Triton server's stream says, read without tritonclient: this environment has none."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from worker.engine.remote.servers import Health
from worker.engine.triton.request import ServerDown

MODULE = "worker.engine.triton.server"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a server that is up and whose backend tells why an answer ended."""
    for name in ("grpc", "tritonclient", "tritonclient.grpc", "tritonclient.grpc.aio",
                 "tritonclient.utils"):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["grpc"].RpcError = type("RpcError", (Exception,), {})  # type: ignore[attr-defined]
    sys.modules["tritonclient.grpc"].InferInput = None  # type: ignore[attr-defined]
    sys.modules["tritonclient.grpc.aio"].InferenceServerClient = Client  # type: ignore[attr-defined]
    sys.modules["tritonclient.utils"].InferenceServerException = Exception  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)  # made of stand-ins: for this test alone
    server = module.TritonServer("fake:1", "vllm_model")
    server.up, server.extras = True, module.EXTRAS
    server._request = lambda *_: {}
    return server


class Client:
    """Streams the pieces that `pieces` holds: text, finish_reason, and whether it is the last."""

    def __init__(self, *_: object, **__: object) -> None:
        self.pieces: list[tuple[str, str, bool]] = []

    def stream_infer(self, _: object) -> Call:
        """Begin a stream."""
        return Call(self.pieces)


class Call:
    """One stream."""

    def __init__(self, pieces: list[tuple[str, str, bool]]) -> None:
        self.pieces, self.cancelled = pieces, False

    async def __aiter__(self) -> AsyncIterator[tuple[Any, None]]:
        for text, reason, last in self.pieces:
            tensors = {"text_output": [text.encode()], "finish_reason": [reason.encode()]}
            final = {"triton_final_response": SimpleNamespace(bool_param=last)}
            response = SimpleNamespace(parameters=final)
            yield SimpleNamespace(as_numpy=tensors.get, get_response=lambda r=response: r), None

    def cancel(self) -> None:
        """Note it."""
        self.cancelled = True


async def test_an_answer_that_its_server_aborted_is_no_answer(server: Any) -> None:
    server._client.pieces = [("half an ", "None", False), ("ans", "abort", True)]
    with pytest.raises(ServerDown, match="its engine was shut down"):
        await server.run("Hi", b"{}", "r1")
    assert server.pieces == {}


async def test_an_answer_that_ended_by_itself_is_one(server: Any) -> None:
    server._client.pieces = [("half an ", "None", False), ("answer", "stop", True)]
    answer = await server.run("Hi", b"{}", "r1")
    assert (answer.text, answer.finish_reason) == ("half an answer", "stop")


async def test_the_pieces_so_far_are_there_while_it_runs(server: Any) -> None:
    seen: list[bytes] = []

    async def look(self: Call) -> AsyncIterator[tuple[Any, None]]:
        async for piece in pieces(self):
            yield piece
            seen.append(b"".join(server.pieces["r1"]))

    pieces, server._client.pieces = Call.__aiter__, [("half ", "None", False), ("an", "stop", True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "__aiter__", look)
        await server.run("Hi", b"{}", "r1")
    assert seen == [b"half "]
    assert server.pieces == {}


async def test_a_stream_that_ends_before_its_answer_is_whole_is_no_answer(server: Any) -> None:
    server._client.pieces = [("half an ", "None", False)]
    with pytest.raises(ServerDown, match="before the end of the answer"):
        await server.run("Hi", b"{}", "r1")


async def test_a_request_that_is_interrupted_is_cancelled_in_the_server(server: Any) -> None:
    begun = asyncio.Event()
    calls: list[Call] = []

    async def hang(self: Call) -> AsyncIterator[tuple[Any, None]]:
        calls.append(self)
        begun.set()
        await asyncio.Event().wait()
        yield None, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "__aiter__", hang)
        running = asyncio.create_task(server.run("Hi", b"{}", "r1"))
        await begun.wait()
        server.interrupt("no step for 300 s")
        with pytest.raises(ServerDown, match="no step for 300 s"):
            await running
    assert [call.cancelled for call in calls] == [True]


@pytest.mark.parametrize(
    ("error", "health"),
    [("StatusCode.DEADLINE_EXCEEDED", Health.SILENT), ("StatusCode.UNAVAILABLE", Health.ILL)],
)
async def test_a_late_answer_about_health_is_not_a_bad_one(
    server: Any, error: str, health: Health
) -> None:
    async def fail(*_: object, **__: object) -> bool:
        raise ConnectionError(error)

    server._client.is_model_ready = fail
    assert (await server.ask()).health is health


async def test_a_server_that_was_away_tells_what_its_model_takes(server: Any) -> None:
    async def ready(*_: object, **__: object) -> bool:
        return True

    async def config(*_: object, **__: object) -> Any:
        named = [SimpleNamespace(name=name) for name in inputs]
        parameters = {"WARMQ_MAX_NUM_SEQS": SimpleNamespace(string_value="7")}
        return SimpleNamespace(config=SimpleNamespace(input=named, parameters=parameters))

    server.up, server._client.is_model_ready, server._client.get_model_config = False, ready, config
    inputs = ["text_input", "return_finish_reason"]
    assert (await server.ask()).health is Health.WELL
    assert server.extras == ("return_finish_reason",)
    assert server.parameters == {"WARMQ_MAX_NUM_SEQS": "7"}
    inputs = ["image"]
    report = await server.ask()
    assert report.health is Health.UNUSABLE
    assert "['image'] instead of the vLLM backend's" in report.why
