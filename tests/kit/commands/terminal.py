"""A terminal with a shell in it, typed into line by line, for tests of pages."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping
from pathlib import Path

from demo.stack import eventually

CTRL_C = "^C"
#: The shell's prompts: it waits for a command, with the last one's status, or for more of one.
_READY, _MORE = "<warmq-prompt ", "<warmq-more>"
_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SIZE = struct.pack("HHHH", 24, 110, 0, 0)


class Terminal:
    """A bash of its own on a pseudo-terminal, as a user has it: Ctrl-C reaches what runs there."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        settings = termios.tcgetattr(theirs)
        settings[3] &= ~termios.ECHO  # what is read is what commands print
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, _SIZE)
        prompts = {"PS1": f"{_READY}$?>", "PS2": _MORE, "TERM": "xterm-256color"}
        self._shell = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"],
            cwd=folder, env={**env, **prompts}, stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        self._written = b""
        self._typed = self._begun = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        eventually(lambda: self.status is not None, 20, "the shell's prompt")

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the last process has closed its end
            while piece := os.read(self._ours, 65536):
                self._written += piece

    def _plain(self, since: int) -> str:
        return _STYLES.sub("", self._written[since:].decode(errors="replace"))

    @property
    def said(self) -> str:
        """What was printed since the last `begin`, without colours, with the prompts."""
        return self._plain(self._begun)

    @property
    def status(self) -> int | None:
        """The last command's exit status; None while it runs, or the shell waits for more."""
        # Not only at the end: processes that a command leaves behind may write after the prompt.
        found = re.search(rf"{_READY}(\d+)>", self._plain(self._typed))
        return int(found.group(1)) if found else None

    def begin(self) -> None:
        """Forget what was printed so far."""
        self._begun = len(self._written)

    def type(self, line: str) -> None:
        """Type a line; `^C` is the key. What it starts may still run when this returns."""
        self._typed = len(self._written)
        os.write(self._ours, b"\x03" if line == CTRL_C else line.encode() + b"\n")

    def run(self, line: str, timeout_s: float) -> int | None:
        """Type a line and return its command's status; None if the shell waits for more of it."""
        self.type(line)
        done = eventually(
            lambda: _MORE in self._plain(self._typed) or self.status is not None, timeout_s,
            f"`{line}` ends", every_s=0.05,
        )  # fmt: skip
        return self.status if done else None

    def close(self) -> None:
        """Kill what runs here, and the shell."""
        with contextlib.suppress(OSError, ProcessLookupError):
            os.killpg(os.tcgetpgrp(self._ours), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait(20)
        self._reader.join(20)
        os.close(self._ours)
