"""Starts the batch runner, and starts it again when it dies."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

log = logging.getLogger(__name__)

#: Waits before a restart: doubled each time, the first one again after a process that lived.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _LIVED_S = 0.2, 10.0, 30.0
#: Time to release its batches.
_GRACE_S = 10.0


class RunnerProcess:
    """The process `python -m gateway.batches.runner`.

    Its parent is a thread that lives as long as this process: the kernel signals it when that ends.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="warmq-batch-runner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
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
                _terminate(process)
                return
            if time.monotonic() - began > _LIVED_S:
                wait_s = _FIRST_WAIT_S
            log.error(
                "the batch runner ended with status %s; starting it again",
                process.returncode,
                extra={"action": "carrier_ended"},
            )
            self._ended.wait(wait_s)
            wait_s = min(_LONGEST_WAIT_S, wait_s * 2)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
