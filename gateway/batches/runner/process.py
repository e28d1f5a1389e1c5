"""Starts the batch runner, and restarts it when it dies."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

log = logging.getLogger(__name__)

#: Seconds before the first restart. Each further wait is twice as long, up to _LONGEST_WAIT_S.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
#: Seconds that a process must have run for _FIRST_WAIT_S to apply again.
_LIVED_S = 30.0
#: Seconds that the batch runner gets to release its batches.
_GRACE_S = 10.0


class RunnerProcess:
    """Runs the process `python -m gateway.batches.runner`.

    That process asks the kernel for a signal when the thread that started it ends
    (PR_SET_PDEATHSIG). So this class uses one thread that lives as long as the gateway.
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
                "the batch runner ended with status %s; it is started again",
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
