"""Changes Celery's worker program: its options, banner, signals and standard streams.

worker/app.py sets `Program` as the app's `Worker`, in place of the class in celery/apps/worker.py
of Celery 5.7.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import uuid
import warnings
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from celery import platforms, signals
from celery.apps.worker import Worker, _reload_current_worker
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

#: The exit status by the signal that begins the stop, as Celery's (docs/how-to/operations.md).
_STOPS = {"SIGTERM": EX_OK, "SIGINT": EX_FAILURE, "SIGQUIT": EX_OK}


def set_option_defaults() -> None:
    """Set defaults of `celery worker`'s options: log level INFO, and a unique node name.

    A process id would not be unique: two containers with the same host name may have the same.
    """
    defaults = {
        "loglevel": "INFO",
        "hostname": host_format(default_nodename(f"warmq-{uuid.uuid4().hex[:6]}@%h")),
    }
    for option in worker_command.params:
        option.default = defaults.get(option.name, option.default)


def log_as_json() -> None:
    """Make all loggers that Celery sets up write lines of JSON."""

    def change_handlers(logger: logging.Logger, **_: Any) -> None:
        as_json(logger.handlers)

    for signal_ in (signals.after_setup_logger, signals.after_setup_task_logger):
        signal_.connect(change_handlers, weak=False)


class Program(Worker):
    """Celery's worker with warmq's banner, and fewer log lines while it stops."""

    def on_before_init(self, **options: Any) -> None:
        """Prepare as Celery does, but with a printable node name, and no warning about root."""
        # Celery warns root of pickled messages, but this app accepts only JSON.
        warnings.simplefilter("ignore", SecurityWarning)
        reap_inherited()
        # The node name becomes part of a queue's name, and is shown in the log and to producers.
        self.hostname: str = _printable(str(self.hostname))
        super().on_before_init(**options)

    def emit_banner(self) -> None:
        """Print the banner; with WARMQ_LOG_FORMAT=json log it."""
        settings = current().settings
        text = banner(settings, str(self.hostname))
        if settings.log_format == "json":
            log.info("%s", text, extra={"action": "starting"})
        else:
            write_once(text)

    def set_process_status(self, info: str) -> Any:
        """Set Celery's process title, with printable characters only."""
        words = _printable(platforms.strargv(sys.argv))
        return platforms.set_mp_process_title(
            "celeryd", info=f"{info} ({words})", hostname=self.hostname
        )

    def on_consumer_ready(self, consumer: Any) -> None:
        """Send Celery's signal without its `ready` line, as the engine may not be ready yet."""
        signals.worker_ready.send(sender=consumer)

    def install_platform_tweaks(self, worker: Any) -> None:
        """Install Celery's signal handlers, and warmq's own for stops and for the restart.

        The drain logs a stop, so the handler of stops prints no line. The handler of the restart
        prints its line in a way that survives a full disk.
        """
        super().install_platform_tweaks(worker)
        for name in _STOPS:
            signal.signal(signal.Signals[name], self._stop_asked)
        if callable(signal.getsignal(signal.SIGHUP)):  # in a terminal Celery sets no handler
            signal.signal(signal.SIGHUP, self._restart_asked)

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

    def _restart_asked(self, *_: Any) -> None:
        with in_sighandler():
            write_once("restarting: the worker stops, and this process starts another")
        atexit.register(_reload_current_worker)
        state.should_stop = EX_OK


def reap_inherited() -> None:
    """Wait, in threads, for the child processes that this process had before a restart.

    After SIGHUP this process runs a new worker. The previous engine's processes are still its
    children, and would stay as zombies.
    """
    with suppress(OSError):  # not every kernel has this file
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            threading.Thread(target=_reap, args=(int(pid),), daemon=True).start()


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _printable(text: str) -> str:
    """Replace characters that cannot be printed, among them bytes that are not UTF-8."""
    decoded = os.fsencode(text).decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in decoded)


def banner(settings: WorkerSettings, name: str) -> str:
    """Return the text that a worker prints when it starts."""
    unnamed = "the one its server lists"
    if settings.engine == "simulated":
        unnamed = "none: the answers are simulated"
    rows = {
        "worker": f"{name}, process {os.getpid()}",
        "engine": settings.engine,
        "model": settings.model or unnamed,
        "queue": settings.queue_to_drain,
        "Redis": masked(settings.redis_url.get_secret_value()),
    }
    if settings.see_engine_log:
        rows["log"] = f"this one{settings.see_engine_log} (WARMQ_ENGINE_LOG=- puts it here)"
    if os.geteuid() == 0:
        rows["user"] = "root; an ordinary user is enough"
    lines = [f"warmq {version()}", *(f"  {key:<8}{value}" for key, value in rows.items())]
    lines += [
        'Starting the engine, which takes seconds to minutes: a line with "ready" follows.',
        "Then it answers what is submitted to its queue, from any machine. To stop it: Ctrl-C.",
    ]
    return "\n".join(lines)


# -- the standard streams, which the parent process may have closed -------------------


def open_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed.

    A closed stderr becomes a copy of stdout, so that a failed start can print its reason. A closed
    stdin or stdout becomes /dev/null. If stderr stayed closed, the next socket would get number 2,
    and the text that vLLM or faulthandler write to stderr would be sent to Redis. A number that a
    library has taken since the start stays the library's.
    """
    atexit.register(_drop_unwritten)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        taken = _is_open(number)  # by a library's file: libffi keeps one
        place = os.dup(sys.stdout.fileno()) if number == 2 else os.open(os.devnull, os.O_RDWR)
        if not taken:
            os.dup2(place, number)
            os.set_inheritable(number, True)
            if place != number:
                os.close(place)
            place = number
        mode = "w" if number else "r"
        stream = open(place, mode, 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _drop_unwritten() -> None:
    """Drop the text that stdout and stderr cannot take, for example because of a full disk.

    Python flushes them after this, and a failure would change the exit status to 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # ValueError: it is closed
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def write_once(text: str) -> None:
    """Write a line to stdout without a buffer; ignore errors, for example of a full disk."""
    stream = sys.__stdout__
    if stream is None:
        return
    line = f"{text}\n".encode(stream.encoding, "backslashreplace")
    with suppress(OSError):
        os.write(stream.fileno(), line)
