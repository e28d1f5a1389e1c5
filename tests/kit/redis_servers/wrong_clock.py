"""A Redis whose wall clock can be set wrong, by a library that is compiled and preloaded."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

from demo.stack import redis_binary

SOURCE = Path(__file__).with_suffix(".c")


class WrongClock:
    """How wrong one Redis's clock is; it starts right.

    `binary` is the program to give to RedisServer: a redis-server that reads this clock.
    """

    def __init__(self, folder: Path, server: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.off_s = 0.0
        self._file = folder / "clock"
        self._write()
        library = folder / "wrong_clock.so"
        subprocess.run(
            [compiler(), "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"],
            check=True, timeout=60,
        )  # fmt: skip
        program = folder / "redis-server"
        program.write_text(
            f'#!/bin/sh\nLD_PRELOAD="{library}" WARMQ_TEST_CLOCK="{self._file}" '
            f'exec "{server or redis_binary()}" "$@"\n'
        )
        program.chmod(0o755)
        self.binary = str(program)

    def step(self, seconds: float) -> None:
        """Move the clock by so many seconds, back too."""
        self.off_s += seconds
        self._write()

    def _write(self) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", round(self.off_s * 1e6)))


def steppable_clock(folder: str | Path) -> WrongClock | None:
    """Return a clock that can be set wrong, None where no compiler is."""
    return WrongClock(Path(folder)) if compiler() else None


def compiler() -> str:
    """Return a C compiler, "" if this machine has none: then clocks stay right."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or ""
