"""Runs a private Redis and a worker on this machine, for one run.

Both end with this process, also if it is killed: each asks the kernel for a signal at its parent's
end. They are in sessions of their own, so that Ctrl-C reaches only this process, which ends them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from contract.errors import WarmqError
from contract.settings import SourcedSettings, Text, load

#: Seconds that Redis may take to start, and that each process may take to end before it is killed.
#: An engine on an NPU gets 120 s to release its card.
_START_S, _END_S = 20.0, 150.0
#: Most lines of a log that an error repeats.
_SHOWN_LINES = 6
#: A program that asks for SIGKILL at its parent's end (PR_SET_PDEATHSIG), and becomes another one.
#: Its arguments are the parent's process id, and the other program with its arguments.
_ENDS_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


class _ServedName(SourcedSettings):
    """The worker's setting that decides its queue."""

    served_model_name: Text = ""


def local_model() -> str:
    """Return a local run's model; '' if its worker accepts any model name."""
    return load(_ServedName).served_model_name


class LocalPartEnded(WarmqError):
    """The private Redis or the worker could not start, or has ended during the run."""

    code = "local_part_ended"


class _Part:
    """One process of a local run; its output goes to a file."""

    def __init__(
        self, name: str, folder: Path, arguments: list[str], env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-SE", "-c", _ENDS_WITH_PARENT, str(os.getpid()), *arguments]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def check(self) -> None:
        """Raise LocalPartEnded if the process has ended."""
        status = self._process.poll()
        if status is None:
            return
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        lines = self.log.read_text(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        raise LocalPartEnded("\n".join([
            f"the {self.name} of this run ended {how}; its log is {self.log}; the same command "
            "goes on where it stopped", *lines,
        ]))  # fmt: skip

    def end(self) -> None:
        """End the process, and what it has started."""
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        finally:  # also after a second Ctrl-C
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def local_services(model: str, queue: str, tell: Callable[[str], None]) -> Iterator[str]:
    """Run a private Redis and a worker with this model; yield the Redis URL.

    The main thread gets LocalPartEnded when one of them ends. Their logs are kept after an error.

    Raises:
        LocalPartEnded: a program is missing, or has ended.
    """
    redis, worker = _program("redis-server"), _program("warmq-worker")
    folder = Path(tempfile.mkdtemp(prefix="warmq-local-"))
    socket, url = folder / "redis.sock", f"unix://{folder / 'redis.sock'}"
    with ExitStack() as stack:
        logs = stack.enter_context(ExitStack())
        logs.callback(shutil.rmtree, folder, ignore_errors=True)
        parts: list[_Part] = []

        def start(name: str, arguments: list[str], **env: str) -> None:
            part = _Part(name, folder, arguments, os.environ | env)
            stack.callback(part.end)
            parts.append(part)

        config = folder / "redis.conf"
        config.write_text(
            f'port 0\nunixsocket "{socket}"\ndir "{folder}"\nsave ""\nappendonly no\n'
        )
        model_variable = {"WARMQ_MODEL": model} if model else {}
        try:
            start("Redis", [redis, str(config)])
            _wait_for(socket, parts[0])
            # The worker finishes nothing when it stops: the next run repeats what was running.
            start("worker", [worker], WARMQ_REDIS_URL=url, WARMQ_QUEUE=queue,
                  WARMQ_DRAIN_TIMEOUT_S="0", **model_variable)  # fmt: skip
            tell(f"a worker starts, which takes seconds to minutes; its log is {parts[1].log}")
            # Watching stops before the parts are ended, because then their end is no error.
            with _watched(parts):
                yield url
        except LocalPartEnded:
            logs.pop_all()  # the logs are kept
            raise


@contextmanager
def _watched(parts: list[_Part]) -> Iterator[None]:
    """Raise LocalPartEnded in the main thread when a part ends, until the block is left."""

    def check(*_: Any) -> None:
        for part in parts:
            part.check()

    before = signal.signal(signal.SIGCHLD, check)
    try:
        check()
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _program(name: str) -> str:
    """Return the path of a program; raise LocalPartEnded if it is not installed."""
    own = str(Path(sys.executable).parent)
    if found := shutil.which(name, path=f"{own}{os.pathsep}{os.environ.get('PATH', '')}"):
        return found
    raise LocalPartEnded(f"{name} is not installed; `make setup` installs it")


def _wait_for(socket: Path, part: _Part) -> None:
    until = time.monotonic() + _START_S
    while not socket.exists():
        part.check()
        if time.monotonic() > until:
            raise LocalPartEnded(f"Redis did not start in {_START_S:g} s; its log is {part.log}")
        time.sleep(0.02)
