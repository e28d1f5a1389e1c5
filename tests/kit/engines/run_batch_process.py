"""vLLM's `run-batch` of the installed release, in a process of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kit.engines.run_batch_lines import NAME
from kit.stacks.real_stack import read_jsonl

from demo.stack import CPU_ENGINE_ARGS, MODEL, ROOT

#: Two engines run side by side: bound to cores, both would be bound to the same one.
BESIDE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class RunBatch:
    """vLLM's run-batch over a file, in a process; its log and output are beside the source."""

    def __init__(self, source: Path, words: str, model: Path = MODEL) -> None:
        self._out, log = source.with_suffix(".vllm.jsonl"), source.with_suffix(".vllm.log")
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(source), "-o",
            str(self._out), "--model", str(model), "--served-model-name", NAME,
            *shlex.split(f"{CPU_ENGINE_ARGS} {words}"),
        ]  # fmt: skip
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | BESIDE
        with log.open("wb") as to:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=to, stderr=to, start_new_session=True
            )

    def lines(self) -> list[dict[str, Any]]:
        """Return the output lines; run-batch must have ended well."""
        assert self._process.wait(240) == 0, self._out
        return read_jsonl(self._out)

    def __enter__(self) -> RunBatch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)


def comparable(value: Any) -> Any:
    """Without what differs between two runs of one server: ids, times, the last digits."""
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items() if k not in ("id", "created")}
    if isinstance(value, list):
        return [comparable(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
