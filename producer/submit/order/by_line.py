"""Puts a result file into the order of the input, after a run that went through it in another."""

from array import array
from pathlib import Path

import msgspec
import numpy as np

from producer.input.files import AtomicFile, unwritable


class _Numbered(msgspec.Struct):
    line: int


class _Line(msgspec.Struct):
    error: _Numbered | None = None
    warmq: _Numbered | None = None


_decode = msgspec.json.Decoder(_Line).decode


def sort_by_line(path: Path) -> None:
    """Write a file of output lines anew, sorted by the numbers of their input lines.

    It takes 24 bytes of memory a line, and for a while as much disk as the file has.

    Raises:
        OutputUnwritable: the file cannot be read, or there is no room for its copy.
    """
    numbers, starts = array("q"), array("q", [0])
    try:
        with path.open("rb") as file:
            for raw in file:
                line = _decode(raw)
                numbers.append((line.error or line.warmq or _Numbered(0)).line)
                starts.append(starts[-1] + len(raw))
            found = np.frombuffer(numbers, dtype=np.int64)
            if not (found[1:] < found[:-1]).any():
                return
            with AtomicFile(path) as anew:
                for at in np.argsort(found, kind="stable"):
                    file.seek(starts[at])
                    anew.write(file.read(starts[at + 1] - starts[at]))
    except OSError as error:
        raise unwritable(path, error) from None
