"""Entry point of the batch runner, a child process of `producer serve`."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack

from contract.errors import StoreUnavailable, WarmqError
from contract.log_lines import set_up
from contract.settings import load
from contract.traces import tracing
from gateway.batches.runner.runner import BatchRunner
from gateway.http.services import Services
from gateway.settings import GatewaySettings
from producer.heap import keep_free_memory

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
#: Seconds to release batches at the end; a lease that is not released expires.
_GRACE_S = 8.0
#: Seconds between two tries to connect to Redis at the start.
_RETRY_S = 0.5


def _end_with(parent: int) -> None:
    """Make the kernel send SIGTERM to this process when its parent process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


def _open(settings: GatewaySettings) -> Services:
    """Connect to Redis, waiting while it is unreachable, and open the store.

    Raises:
        FileStoreFailed: The store cannot be used.
    """
    logged = False
    while True:
        try:
            return Services.open(settings, "warmq-batch-runner")
        except StoreUnavailable as error:
            if not logged:
                message = "batches wait for Redis: %s"
                log.warning(message, error.message, extra={"action": "no_carrying"})
            logged = True
        time.sleep(_RETRY_S)


def main() -> int:
    """Run batches until SIGTERM; the argument is the parent's process id."""
    keep_free_memory()
    # The gateway handles Ctrl-C, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runner: BatchRunner | None = None

    def end(*_: object) -> None:
        if runner is None:
            os._exit(0)
        timer = threading.Timer(_GRACE_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        # stop() needs a thread: the code that this handler interrupts may hold the lock of stop().
        threading.Thread(target=runner.stop, daemon=True).start()

    signal.signal(signal.SIGTERM, end)
    if len(sys.argv) > 1:
        _end_with(int(sys.argv[1]))
    try:
        settings = load(GatewaySettings)
        set_up(settings.log_format, "%(levelname)s:     batches: %(message)s")
        services = _open(settings)
        traces = ExitStack()
        traces.enter_context(tracing(settings.traces, "warmq-gateway"))
    except WarmqError as error:
        log.error("%s", error.message, extra={"action": "carrier_failed"})
        return 1
    with traces:
        runner = BatchRunner(services)
        runner.run()
    services.close()
    return 0


sys.exit(main())
