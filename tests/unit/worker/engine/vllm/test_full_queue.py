"""Requests wait while vLLM refuses more because enough are queued."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from contract.errors import EngineDead, RequestRejected
from demo.stack import MODEL
from worker.engine import Completion, EngineRequest
from worker.engine.vllm_settings import VllmSettings

URL = "/v1/completions"


class Admission:
    """An engine that takes `places` sequences, and its class for completions."""

    def __init__(self, places: int) -> None:
        self.places, self.running, self.refused, self.most = places, 0, 0, 0
        self.errored = False
        scheduler = SimpleNamespace(max_num_queued_reqs=places)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler)

    def check_admission(self, n: int = 1) -> None:
        from vllm.exceptions import QueueOverflowError

        if self.running + n > self.places:
            self.refused += 1
            raise QueueOverflowError

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    async def call(self, _: dict[str, Any]) -> str:
        self.check_admission()
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return "answered"


def made(admission: Admission, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a vllm engine in front of this one."""
    from worker.engine.vllm.engine import VllmEngine

    monkeypatch.setattr("worker.engine.vllm.queue_limits.ASK_EVERY_S", 0.001)
    monkeypatch.setattr("worker.engine.vllm.serving.refuse_unserved", lambda *_: None)
    engine = VllmEngine(VllmSettings(model=str(MODEL)))
    engine._engine = admission
    engine._serving = {URL: admission}
    engine._context = 1000
    monkeypatch.setattr(engine, "_completion_of", lambda *_: Completion(b"{}", 1, 1))
    return engine


async def test_all_are_answered_and_none_is_a_failed_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission = Admission(2)
    engine = made(admission, monkeypatch)
    requests = [EngineRequest(URL, {"prompt": str(n), "max_tokens": 1}) for n in range(30)]
    answers = await asyncio.gather(*(engine.generate(r, f"r{n}") for n, r in enumerate(requests)))
    assert len(answers) == 30
    assert admission.most == 2
    assert admission.refused > 0


async def test_more_sequences_than_are_ever_taken_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission = Admission(2)
    admission.running = 2
    engine = made(admission, monkeypatch)
    body = {"prompt": "x", "n": 3, "max_tokens": 1}
    with pytest.raises(RequestRejected, match="allows 2"):
        await engine.generate(EngineRequest(URL, body), "r1")


async def test_a_request_that_waits_goes_back_when_the_engine_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission = Admission(1)
    admission.running = 1
    engine = made(admission, monkeypatch)
    body = {"prompt": "x", "max_tokens": 1}
    waiting = asyncio.create_task(engine.generate(EngineRequest(URL, body), "r1"))
    async with asyncio.timeout(20):
        while admission.refused < 3:  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.001)
    admission.errored = True
    with pytest.raises(EngineDead) as caught:
        await waiting
    assert not caught.value.inside
