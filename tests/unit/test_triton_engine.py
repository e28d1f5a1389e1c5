"""The Triton adapter over servers of the test's making: who gets a request, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from contract.errors import EngineDead, RequestFailed, RequestRejected
from contract.openai.body import CHAT_URL
from contract.settings import SettingsError
from demo.stack import MODEL
from worker.engine import EngineRequest
from worker.engine.triton.engine import MOST_SERVERS, TritonEngine
from worker.engine.triton.request import Answer, Prompts, ServerAway, ServerRefused
from worker.engine.triton.settings import TritonSettings

ASKED = EngineRequest(CHAT_URL, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})


class FakeServer:
    """Answers at once, or does what it was given to do."""

    def __init__(self, *fates: Answer | Exception, stays_up: bool = False, busy: int = 0) -> None:
        self.address, self.why, self.up = "fake:1", "it went", True
        self.in_flight, self.progress = busy, 0.0
        self.asked: list[dict[str, Any]] = []
        self.dropped = False
        self._fates = list(fates)
        self._stays_up = stays_up

    async def run(self, prompt: str, parameters: bytes, request_id: str) -> Answer:
        """Meet the next fate; the last one repeats."""
        self.asked.append(json.loads(parameters))
        fate = self._fates.pop(0) if len(self._fates) > 1 else self._fates[0]
        if isinstance(fate, Exception):
            self.up = self._stays_up
            raise fate
        return fate

    def drop_calls(self) -> None:
        """Note it."""
        self.dropped = True


@cache
def prompts() -> Prompts:
    """Return the shipped model's tokenizer; it takes a second to load."""
    return Prompts(str(MODEL))


def engine_over(servers: Sequence[FakeServer]) -> TritonEngine:
    """Return an engine that knows these servers."""
    engine = TritonEngine(TritonSettings(engine="triton", model=str(MODEL)))
    engine._prompts = prompts()
    engine._servers = servers  # type: ignore[assignment]
    return engine


async def answer(engine: TritonEngine) -> dict[str, Any]:
    """Return the body of one answer."""
    body: dict[str, Any] = json.loads((await engine.generate(ASKED, "r1")).body)
    return body


async def test_a_request_goes_to_the_least_busy_server_that_is_up() -> None:
    servers = [FakeServer(Answer("x"), busy=n) for n in (3, 1, 2)]
    await answer(engine_over(servers))
    assert [len(one.asked) for one in servers] == [0, 1, 0]
    servers[1].up = False
    await answer(engine_over(servers))
    assert [len(one.asked) for one in servers] == [0, 1, 1]


async def test_a_request_whose_server_goes_away_runs_on_another() -> None:
    servers = [FakeServer(ServerAway("gone")), FakeServer(Answer("x"), busy=1)]
    assert (await answer(engine_over(servers)))["choices"][0]["message"]["content"] == "x"


async def test_without_a_server_the_engine_is_dead_and_the_request_is_not_blamed() -> None:
    engine = engine_over([FakeServer(ServerAway("gone"))])
    with pytest.raises(EngineDead, match="fake:1: it went") as raised:
        await engine.generate(ASKED, "r1")
    assert raised.value.inside is False
    assert engine.dead()


async def test_a_request_is_not_moved_for_ever() -> None:
    server = FakeServer(ServerAway("gone"), stays_up=True)
    with pytest.raises(RequestFailed, match="went away"):
        await engine_over([server]).generate(ASKED, "r1")
    assert len(server.asked) == MOST_SERVERS


async def test_what_a_backend_does_not_tell_is_counted_here() -> None:
    body = await answer(engine_over([FakeServer(Answer(" 7"))]))
    assert body["choices"][0]["finish_reason"] == "length", "two tokens were allowed"
    assert body["usage"]["completion_tokens"] == 2
    body = await answer(engine_over([FakeServer(Answer("7"))]))
    assert body["choices"][0]["finish_reason"] == "stop"
    told = Answer("7", finish_reason="length", prompt_tokens=5, completion_tokens=2)
    body = await answer(engine_over([FakeServer(told)]))
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


@pytest.mark.parametrize(
    ("message", "kind", "code"),
    [
        ("Error generating stream: The decoder prompt (length 9) is longer than the maximum model "
         "length of 8.", RequestRejected, "context_length_exceeded"),
        ("Error generating stream: 'NoneType' object has no attribute 'lora_name'",
         RequestRejected, "invalid_request"),
        ("Error generating stream: something else", RequestFailed, "request_failed"),
    ],
)  # fmt: skip
async def test_errors_of_the_backend_become_errors_of_that_request(
    message: str, kind: type[Exception], code: str
) -> None:
    engine = engine_over([FakeServer(ServerRefused(message), stays_up=True)])
    with pytest.raises(kind) as raised:
        await engine.generate(ASKED, "r1")
    assert raised.value.code == code  # type: ignore[attr-defined]


async def test_only_a_server_that_sends_nothing_is_left_when_the_engine_is_killed() -> None:
    servers = [FakeServer(Answer("x"), busy=n) for n in (1, 1, 0)]
    servers[0].progress, servers[1].progress = 5.0, 9.0
    engine = engine_over(servers)
    assert engine.last_progress() == 5.0
    engine.kill()
    assert [one.dropped for one in servers] == [True, False, False]


async def test_no_server_within_the_wait_is_a_dead_engine_that_says_why() -> None:
    settings = TritonSettings(engine="triton", model=str(MODEL), triton_wait_s=0.001)
    engine = TritonEngine(settings)

    class NotReady(FakeServer):
        async def ask(self) -> bool:
            self.up = False
            return await asyncio.sleep(0, False)

    engine._connect = lambda address, model: NotReady(Answer())  # type: ignore[assignment,return-value]
    with pytest.raises(EngineDead, match="no Triton server is ready: fake:1: it went"):
        await engine.start()


def test_what_is_not_installed_or_no_tokenizer_is_a_setting_to_mend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delitem(sys.modules, "worker.engine.triton.server", raising=False)
    monkeypatch.setitem(sys.modules, "tritonclient.grpc", None)
    engine = TritonEngine(TritonSettings(engine="triton", model=str(MODEL)))
    with pytest.raises(SettingsError, match="scripts/setup base build triton"):
        engine.build()
    monkeypatch.setitem(sys.modules, "worker.engine.triton.server", type(sys)("fake"))
    sys.modules["worker.engine.triton.server"].Server = FakeServer  # type: ignore[attr-defined]
    engine = TritonEngine(TritonSettings(engine="triton", model=str(tmp_path)))
    with pytest.raises(SettingsError, match="WARMQ_MODEL: no tokenizer in"):
        engine.build()
