"""vLLM in process, and Triton, keep what the drain relies on; test_openai.py has the third."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.engines.conformance import conform
from kit.servers.triton_stack import VENV, TritonServer

from demo.stack import CPU_ENGINE_ARGS, MODEL

pytestmark = pytest.mark.timeout(300)


def test_vllm_in_process_conforms(tmp_path: Path) -> None:
    args = CPU_ENGINE_ARGS.replace("--max-num-seqs 32", "--max-num-seqs 4")
    conform(tmp_path, engine="vllm", model=MODEL, engine_args=args, kill_grace_s=1)


def test_the_triton_engine_conforms(tmp_path: Path) -> None:
    with TritonServer(tmp_path / "triton") as server:
        assert server.process is not None
        conform(
            tmp_path, VENV / "bin" / "python", server.process.pid, inside=(False, False),
            engine="triton", model=MODEL, triton_url=server.url,
        )  # fmt: skip
