"""The Triton adapter over servers of the test's making: who gets a request, and what goes wrong."""

from __future__ import annotations

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
from worker.engine.remote.servers import Health, Report, Server
from worker.engine.spec import Preflight
from worker.engine.triton import TritonSettings
from worker.engine.triton.engine import MOST_SERVERS, TritonEngine, dry_run
from worker.engine.triton.request import Answer, Prompts, ServerDown, ServerRefused

ASKED = EngineRequest(CHAT_URL, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})


class FakeServer(Server):
    """Answers at once, or does what it was given to do."""

    def __init__(
        self, *fates: Answer | Exception, health: Health = Health.WELL, busy: int = 0
    ) -> None:
        super().__init__("fake:1")
        self.up, self.in_flight, self.health = True, busy, health
        self.asked: list[dict[str, Any]] = []
        self._fates = list(fates)

    async def ask(self) -> Report:
        """Return the health it was given."""
        return Report(self.health, "it went")

    async def run(self, prompt: str, parameters: bytes, request_id: str) -> Answer:
        """Meet the next fate; the last one repeats."""
        self.asked.append(json.loads(parameters))
        fate = self._fates.pop(0) if len(self._fates) > 1 else self._fates[0]
        if isinstance(fate, Exception):
            raise fate
        return fate


@cache
def prompts() -> Prompts:
    """Return the shipped model's tokenizer; it takes a second to load."""
    return Prompts(str(MODEL))


def engine_over(servers: Sequence[FakeServer]) -> TritonEngine:
    """Return an engine that knows these servers."""
    engine = TritonEngine(TritonSettings(engine="triton", model=str(MODEL)))
    engine._prompts = prompts()
    engine._servers.servers = servers  # type: ignore[assignment]
    return engine


async def answer(engine: TritonEngine) -> dict[str, Any]:
    """Return the body of one answer."""
    body: dict[str, Any] = json.loads((await engine.generate(ASKED, "r1")).body)
    return body


async def test_a_request_goes_to_the_least_busy_server_that_is_up() -> None:
    servers = [FakeServer(Answer("x"), busy=n) for n in (3, 1, 2)]
    await answer(engine_over(servers))
    assert [len(one.asked) for one in servers] == [0, 1, 0]
    assert [one.in_flight for one in servers] == [3, 1, 2], "its place is free again"
    servers[1].up = False
    await answer(engine_over(servers))
    assert [len(one.asked) for one in servers] == [0, 1, 1]


async def test_a_request_whose_server_goes_away_runs_on_another() -> None:
    servers = [FakeServer(ServerDown("gone")), FakeServer(Answer("x"), busy=1)]
    assert (await answer(engine_over(servers)))["choices"][0]["message"]["content"] == "x"


async def test_without_a_server_the_engine_is_dead_and_the_request_is_not_blamed() -> None:
    engine = engine_over([FakeServer(ServerDown("it went"))])
    with pytest.raises(EngineDead, match="fake:1: it went") as raised:
        await engine.generate(ASKED, "r1")
    assert raised.value.inside is False
    assert engine.dead()


async def test_a_request_is_not_moved_for_ever() -> None:
    servers = [FakeServer(ServerDown("gone")) for _ in range(MOST_SERVERS + 1)]
    with pytest.raises(RequestFailed, match="went down"):
        await engine_over(servers).generate(ASKED, "r1")
    assert sum(len(one.asked) for one in servers) == MOST_SERVERS


async def test_an_error_of_a_server_that_is_ill_sends_the_request_to_another() -> None:
    ill = FakeServer(ServerRefused("something"), health=Health.ILL)
    servers = [ill, FakeServer(Answer("x"), busy=1)]
    assert (await answer(engine_over(servers)))["choices"][0]["message"]["content"] == "x"
    assert not ill.up


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
        ("something else", RequestFailed, "request_failed"),
        ("Error generating stream: ", RequestFailed, "request_failed"),
        ("Error generating stream: CUDA out of memory. Tried to allocate 2 GiB", RequestFailed,
         "request_failed"),
        ("Error generating stream: the connection was reset", RequestFailed, "request_failed"),
    ],
)  # fmt: skip
async def test_errors_of_the_backend_become_errors_of_that_request(
    message: str, kind: type[Exception], code: str
) -> None:
    engine = engine_over([FakeServer(ServerRefused(message))])
    with pytest.raises(kind) as raised:
        await engine.generate(ASKED, "r1")
    assert raised.value.code == code  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "words",
    [
        "temperature must be non-negative, got -1.0.",
        "Grammar error: Invalid type: integr",
        "stop cannot contain an empty string.",
        "something that only the next release says",
    ],
)
async def test_what_the_servers_vllm_refuses_is_the_lines_error_in_its_words(words: str) -> None:
    engine = engine_over([FakeServer(ServerRefused(f"Error generating stream: {words}"))])
    with pytest.raises(RequestRejected) as raised:
        await engine.generate(ASKED, "r1")
    assert (raised.value.code, raised.value.message) == ("invalid_request", words)


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, RequestFailed),
        ({"structured_outputs": {"json": {"type": "string"}}}, RequestRejected),
        ({"response_format": {"type": "json_object"}}, RequestRejected),
    ],
)
async def test_an_answer_that_ends_in_an_error_is_none(
    more: dict[str, Any], kind: type[Exception]
) -> None:
    engine = engine_over([FakeServer(Answer("half", finish_reason="error"))])
    with pytest.raises(kind, match="finish_reason error"):
        await engine.generate(EngineRequest(CHAT_URL, ASKED.body | more), "r1")


async def test_no_server_within_the_wait_is_a_dead_engine_that_says_why() -> None:
    settings = TritonSettings(engine="triton", model=str(MODEL), remote_wait_s=0.001)
    engine = TritonEngine(settings)
    engine._connect = lambda address, model: FakeServer(health=Health.ILL)  # type: ignore[assignment,return-value]
    with pytest.raises(EngineDead, match=r"no server is ready after 0.001 s .* fake:1: it went"):
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
    sys.modules["worker.engine.triton.server"].TritonServer = FakeServer  # type: ignore[attr-defined]
    engine = TritonEngine(TritonSettings(engine="triton", model=str(tmp_path)))
    with pytest.raises(SettingsError, match=r"WARMQ_MODEL: .* has no tokenizer\.json"):
        engine.build()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingsError, match="WARMQ_MODEL: no tokenizer in"):
        engine.build()


@pytest.mark.parametrize(("health", "told"), [(Health.ILL, "no server is ready"), (None, "")])
def test_the_check_asks_the_servers_once(
    monkeypatch: pytest.MonkeyPatch, health: Health | None, told: str
) -> None:
    module: Any = type(sys)("fake")
    module.TritonServer = lambda address, model: one
    monkeypatch.setitem(sys.modules, "worker.engine.triton.server", module)
    one, seen = FakeServer(health=health or Health.WELL), Preflight()
    one.up, one.parameters = False, {}  # type: ignore[attr-defined]
    dry_run(TritonSettings(engine="triton", model=str(MODEL), triton_model="m"), seen)
    assert [found.problem for found in seen.findings] == (
        [f"{told}: fake:1: it went"] if told else []
    )
    assert seen.rows == ({} if told else {"model": "m"})
