"""vLLM in process, and both remote engines, keep what the drain relies on (tests/kit/conformance)."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance import conform
from triton_stack import VENV, TritonServer
from vllm_server import KEY, VllmServer

from demo.stack import CPU_ENGINE_ARGS, MODEL

pytestmark = pytest.mark.timeout(300)


def test_vllm_in_process_conforms(tmp_path: Path) -> None:
    args = CPU_ENGINE_ARGS.replace("--max-num-seqs 32", "--max-num-seqs 4")
    conform(tmp_path, engine="vllm", model=MODEL, engine_args=args, kill_grace_s=1)


def test_the_openai_engine_conforms(tmp_path: Path) -> None:
    server = VllmServer(tmp_path / "vllm.log")
    server.start()
    try:
        assert server.process is not None
        conform(
            tmp_path, server=server.process.pid, inside=False,
            engine="openai", openai_base_urls=server.url, openai_api_key=KEY, openai_concurrency=4,
        )  # fmt: skip
    finally:
        server.kill()


def test_the_triton_engine_conforms(tmp_path: Path) -> None:
    with TritonServer(tmp_path / "triton") as server:
        assert server.process is not None
        conform(
            tmp_path, VENV / "bin" / "python", server.process.pid, inside=False,
            engine="triton", model=MODEL, triton_url=server.url, triton_slots=4,
        )  # fmt: skip
