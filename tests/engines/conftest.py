"""What several files of these tests need is started once: vLLM in process, its server, Triton's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.engines.in_process import InProcess
from kit.servers.triton_stack import TritonServer
from kit.servers.vllm_server import VllmServer

from demo.stack import RedisServer


@pytest.fixture(scope="session")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """Return vLLM's answers in the worker's own process, which may still be under way."""
    folder = tmp_path_factory.mktemp("in-process")
    with RedisServer(folder / "redis") as redis:
        running = InProcess(folder, redis.url)
        try:
            yield running
        finally:
            running.end()


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Return vLLM's running server; who kills it starts it again."""
    server = VllmServer(tmp_path_factory.mktemp("vllm-server") / "vllm.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def triton_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Return a running Triton server; tests leave it as they found it."""
    with TritonServer(tmp_path_factory.mktemp("triton-server")) as running:
        yield running
