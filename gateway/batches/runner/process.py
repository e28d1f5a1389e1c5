"""Starts the process that carries batches, and starts it again when it dies."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

log = logging.getLogger(__name__)

#: Waits before another start: doubled for one that died at once, short again for one that lived.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _LIVED_S = 0.2, 10.0, 30.0
#: It has so long to give back what it holds.
_GRACE_S = 10.0


class RunnerProcess:
    """`python -m gateway.batches.runner`, with this process' environment.

    Its parent is a thread that lives until the end: the kernel ends it with its thread.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="warmq-carrier", daemon=True)

    def start(self) -> None:
        """Start it; return at once."""
        self._thread.start()

    def stop(self) -> None:
        """End it in order."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_GRACE_S + 2)

    def _watch(self) -> None:
        command = [sys.executable, "-m", "gateway.batches.runner", str(os.getpid())]
        wait_s = _FIRST_WAIT_S
        while not self._ended.is_set():
            began = time.monotonic()
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            while process.poll() is None and not self._ended.wait(0.1):
                pass
            if self._ended.is_set():
                _end(process)
                return
            if time.monotonic() - began > _LIVED_S:
                wait_s = _FIRST_WAIT_S
            log.error(
                "the process that carries batches ended (%s): again",
                process.returncode,
                extra={"action": "carrier_ended"},
            )
            self._ended.wait(wait_s)
            wait_s = min(_LONGEST_WAIT_S, wait_s * 2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
