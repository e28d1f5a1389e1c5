"""When a process drew its progress bar: the span of what it did between start and end."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


def span_drawn(process: subprocess.Popen[bytes], mark: bytes, log: Path) -> float:
    """Read a process's stderr to its end into `log`; return the seconds between the first and the
    last piece that has `mark`."""
    drawn = []
    assert process.stderr is not None
    with log.open("wb") as file:
        while chunk := os.read(process.stderr.fileno(), 65536):
            if mark in chunk:
                drawn.append(time.monotonic())
            file.write(chunk)
    return drawn[-1] - drawn[0]
