"""Every answer of every test here is held against OpenAI's own schemas, and /openapi.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from kit.gateways import watched_answers
from kit.gateways.gateway_process import GatewayProcess
from kit.gateways.own_batch_runner import opened
from kit.gateways.real_gateway import RealGateway, real_gateway

from demo.stack import RedisServer
from gateway.batches.runner import runner
from gateway.http.services import Services

watched_answers.watch()


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    """A gateway with vLLM and the shipped model behind it; its start takes half a minute."""
    with real_gateway(tmp_path_factory.mktemp("real")) as found:
        yield found


@pytest.fixture(scope="module")
def gateway(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GatewayProcess]:
    """A gateway without keys and workers on an empty Redis, with the module's GATEWAY_SETTINGS."""
    with redis_server.client() as client:
        client.flushall()
    settings = getattr(request.module, "GATEWAY_SETTINGS", {})
    folder = tmp_path_factory.mktemp("gateway")
    with GatewayProcess(redis_server.url, folder, **settings) as made:
        yield made


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    """The SDK, unchanged, as a client of the gateway."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def services(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    """Return what a gateway works with; a batch that failed is tried again at once."""
    monkeypatch.setattr(runner, "FAILED_MS", 1)
    with opened(redis_url, tmp_path) as found:
        yield found


@pytest.fixture(autouse=True)
def every_answer_is_valid() -> Iterator[None]:
    """Fail a test if an answer that came in it is not as OpenAI's document says."""
    watched_answers.faults.clear()
    yield
    found, watched_answers.faults[:] = list(watched_answers.faults), []
    assert not found, "answers against OpenAI's schemas:\n" + "\n".join(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many answers were judged."""
    total = sum(watched_answers.judged.values())
    terminalreporter.write_line(f"{total} answers held against OpenAI's schemas")
