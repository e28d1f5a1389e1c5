"""Celery's worker program as this worker needs it: its options, what it shows, its signals.

Set as the app's `Worker` (worker/app.py); read beside celery/apps/worker.py of Celery 5.7.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
import warnings
from types import FrameType
from typing import Any

from celery import signals
from celery.apps.worker import Worker
from celery.bin.worker import worker as worker_command
from celery.platforms import EX_FAILURE, EX_OK, SecurityWarning
from celery.utils.log import in_sighandler
from celery.utils.nodenames import default_nodename, host_format
from celery.worker import state

from contract.log_lines import as_json
from contract.redis.connect import masked
from contract.version import version
from worker.process.bootstep import current
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

#: How each stop begins: Celery's exit code (docs/operations.md).
_STOPS = {"SIGTERM": EX_OK, "SIGINT": EX_FAILURE, "SIGQUIT": EX_OK}


def set_option_defaults() -> None:
    """Change the defaults of `celery worker`; what is given on its command line wins.

    Its lines about requests are INFO. Node names must differ, also those of two workers with the
    same process id in two containers that share a host's name.
    """
    defaults = {
        "loglevel": "INFO",
        "hostname": host_format(default_nodename(f"warmq-{uuid.uuid4().hex[:6]}@%h")),
    }
    for option in worker_command.params:
        option.default = defaults.get(option.name, option.default)


def log_as_json() -> None:
    """Let all that Celery sets up to be logged be lines of JSON."""

    def change(logger: logging.Logger, **_: Any) -> None:
        as_json(logger.handlers)

    for signal_ in (signals.after_setup_logger, signals.after_setup_task_logger):
        signal_.connect(change, weak=False)


class Program(Worker):
    """Celery's worker with a banner of our own, and three lines where it is stopped."""

    def on_before_init(self, **options: Any) -> None:
        """Begin as Celery does, but without its paragraph on root; the banner says it."""
        # It is about pickled messages, and the app takes JSON only.
        warnings.simplefilter("ignore", SecurityWarning)
        super().on_before_init(**options)

    def emit_banner(self) -> None:
        """Show what this worker is and what comes next."""
        settings = current().settings
        text = banner(settings, str(self.hostname))
        if settings.log_format == "json":
            log.info("%s", text, extra={"action": "starting"})
        else:
            print(text, file=sys.__stdout__, flush=True)

    def on_consumer_ready(self, consumer: Any) -> None:
        """Say nothing: Celery's `ready` means its control commands, and the engine may not be."""
        signals.worker_ready.send(sender=consumer)

    def install_platform_tweaks(self, worker: Any) -> None:
        """Install Celery's signal handlers, but for the stops, which the drain tells of."""
        super().install_platform_tweaks(worker)
        for name in _STOPS:
            signal.signal(signal.Signals[name], self._stop_asked)

    def _stop_asked(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        again = state.should_stop is not None
        with in_sighandler():
            signals.worker_shutting_down.send(
                sender=self.hostname,
                sig=name,
                how="Cold" if again or name == "SIGQUIT" else "Warm",
                exitcode=_STOPS[name],
            )
        if not again:
            state.should_stop = _STOPS[name]


def banner(settings: WorkerSettings, name: str) -> str:
    """Return what a worker shows when it starts."""
    rows = {
        "worker": f"{name}, process {os.getpid()}",
        "engine": settings.engine,
        "model": settings.model or "as its server says",
        "queue": settings.queue_to_drain,
        "Redis": masked(settings.redis_url.get_secret_value()),
    }
    if os.geteuid() == 0:
        rows["user"] = "root; an ordinary user is enough"
    lines = [f"warmq {version()}", *(f"  {key:<8}{value}" for key, value in rows.items())]
    lines += [
        'Starting the engine, which takes seconds to minutes: a line with "ready" follows.',
        "Then it answers what is submitted to its queue, from any machine. To stop it: Ctrl-C.",
    ]
    return "\n".join(lines)
