"""A server or worker as a process of its own, and what can be seen of one from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from demo.stack import ROOT


class Process:
    """A server or worker of somebody else, with its log; ends with its whole group."""

    def __init__(self, log: Path, command: Sequence[str], **env: str) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
                env=os.environ | env,
            )  # fmt: skip

    def stop(self) -> None:
        """Kill it and its engine."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def check(self) -> None:
        """Raise if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(self.log.read_text(errors="replace")[-4000:])


def well(url: str) -> bool:
    """Whether an OpenAI-compatible server answers at `url`/health."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


def span_drawn(process: subprocess.Popen[bytes], mark: bytes, log: Path) -> float:
    """Read a process's stderr to its end into `log`; return the seconds between the first and the
    last piece that has `mark`, as those of a progress bar do."""
    drawn = []
    assert process.stderr is not None
    with log.open("wb") as file:
        while chunk := os.read(process.stderr.fileno(), 65536):
            if mark in chunk:
                drawn.append(time.monotonic())
            file.write(chunk)
    return drawn[-1] - drawn[0]
