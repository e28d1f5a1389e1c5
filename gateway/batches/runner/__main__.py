"""The process that carries batches: `producer serve` starts it, and it ends with that."""

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
#: What is at hand is given back within so long, or its lease ends by itself.
_GRACE_S = 8.0
#: Between two looks whether Redis is there.
_AGAIN_S = 0.5


def _end_with(parent: int) -> None:
    """Have the kernel send SIGTERM when the process that started this one ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


def _open(settings: GatewaySettings) -> Services:
    """Connect, once Redis is there: it may be starting again, and what died with it waits for this.

    Raises:
        FileStoreFailed: files cannot be kept where the settings say.
    """
    away = False
    while True:
        try:
            return Services.open(settings, "warmq-carrier")
        except StoreUnavailable as error:
            if not away:
                log.warning(
                    "no batches are carried: %s", error.message, extra={"action": "no_carrying"}
                )
            away = True
        time.sleep(_AGAIN_S)


def main() -> int:
    """Carry batches until SIGTERM; the argument is the process id of the parent."""
    keep_free_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the gateway, which ends this
    carrier: BatchRunner | None = None

    def end(*_: object) -> None:
        if carrier is None:
            os._exit(0)
        timer = threading.Timer(_GRACE_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        # Not in this handler: the thread that it interrupts may have the lock of what stop() sets.
        threading.Thread(target=carrier.stop, daemon=True).start()

    signal.signal(signal.SIGTERM, end)
    if len(sys.argv) > 1:
        _end_with(int(sys.argv[1]))
    try:
        settings = load(GatewaySettings)
        set_up(settings.log_format, "%(levelname)s:     carrying: %(message)s")
        services = _open(settings)
        traces = ExitStack()
        traces.enter_context(tracing(settings.traces, "warmq-gateway"))
    except WarmqError as error:
        log.error("%s", error.message, extra={"action": "carrier_failed"})
        return 1
    with traces:
        carrier = BatchRunner(services)
        carrier.run()
    services.close()
    return 0


sys.exit(main())
