"""Runs the process that converts a file, and reads its frames.

A frame is a byte for its kind, its content without line breaks, and a line break.
"""

from __future__ import annotations

import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import orjson

COLUMNS, LINE, PROBLEM, ERROR, END = b"C", b"L", b"P", b"E", b"."
#: Most bytes of data and most seconds of CPU of the process, and most problems that it reports.
MEMORY_BYTES, CPU_S, MOST_PROBLEMS = 2**30, 60, 20
#: Seconds between two checks whether the client waits, and bytes that are read at a time.
_CHECK_S, _PIECE = 0.2, 2**18
#: Most bytes of the name of a file on Linux.
_NAME_BYTES = 255
_DIED = (
    "{name} takes more memory or time than this page gives to a file; submit it in a terminal: "
    "producer submit"
)


@dataclass(slots=True)
class Conversion:
    """The result of a conversion, without the lines.

    `columns` are a table's. `problems` name lines that are no requests, `error` is why the file
    cannot be read. `changed` is False if all lines were in OpenAI's form already.
    """

    columns: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    error: str = ""
    changed: bool = True


def convert(
    path: Path,
    name: str,
    pairs: Mapping[str, str],
    overrides: dict[str, Any],
    longest: int,
    write: Callable[[bytes], None],
    guard: Callable[[], None],
) -> Conversion:
    """Convert a file, passing its lines to `write`.

    `name` is the user's name of the file, whose ending names its kind. `guard` is called regularly;
    an error that `guard` or `write` raises ends the process.
    """
    made, ended = Conversion(), False
    name = _file_name(name)
    with tempfile.TemporaryDirectory(prefix="warmq-page-") as folder:
        (Path(folder) / name).symlink_to(path.absolute())
        options = {"folder": folder, "name": name, "pairs": dict(pairs), "longest": longest,
               "overrides": overrides}  # fmt: skip
        with _process(orjson.dumps(options)) as output:
            for frame in _frames(output, guard, 2 * longest + 2**20):
                kind, content = frame[:1], frame[1:]
                if kind == LINE:
                    write(content + b"\n")
                elif kind == PROBLEM:
                    made.problems.append(orjson.loads(content)[1])
                    write(b"\n")
                elif kind == COLUMNS:
                    made.columns = orjson.loads(content)
                elif kind == ERROR:
                    made.error, ended = orjson.loads(content), True
                else:
                    made.changed, ended = orjson.loads(content), True
    if not ended:
        made.error = _DIED.format(name=name)
    return made


def _file_name(name: str) -> str:
    """Return the end of a name, as long as a file's may be; its ending stays."""
    short = name.encode(errors="replace")[-_NAME_BYTES:].decode(errors="ignore")
    return short if short.strip(".") else "upload"


@contextmanager
def _process(options: bytes) -> Iterator[IO[bytes]]:
    """Start the process with its options, and end it with the context."""
    command = [sys.executable, "-m", "gateway.page.conversion"]
    with subprocess.Popen(
        command,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            with suppress(BrokenPipeError), cast("IO[bytes]", process.stdin) as sent:
                sent.write(options)
            yield cast("IO[bytes]", process.stdout)
        finally:
            process.kill()


def _frames(output: IO[bytes], guard: Callable[[], None], most: int) -> Iterator[bytes]:
    """Yield the frames; the output ends early after a frame of more than `most` bytes."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while len(rest) <= most:
            guard()
            if not selector.select(_CHECK_S):
                continue
            data = output.read(_PIECE)
            if not data:
                return
            *whole, rest = (rest + data).split(b"\n") if b"\n" in data else (rest + data,)
            yield from whole
