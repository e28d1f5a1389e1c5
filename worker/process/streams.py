"""The standard streams of a worker, which whoever starts it may have closed."""

import contextlib
import os
import sys


def open_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed.

    A closed stderr goes where stdout goes, so that a start that fails can say why; what has no
    place goes to /dev/null. Else the next socket would get stderr's number, and what vLLM or
    faulthandler write there would go to Redis.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        if not _is_open(number):
            place = os.dup(1) if number == 2 else os.open(os.devnull, os.O_RDWR)
            os.dup2(place, number)
            os.set_inheritable(number, True)
            if place != number:
                os.close(place)
        mode = "w" if number else "r"
        stream = open(number, mode, 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def write_once(text: str) -> None:
    """Write a line to stdout; where it cannot be written, as on a full disk, it is lost.

    Nothing is left in a buffer, whose last flush would change the exit status.
    """
    stream = sys.__stdout__
    if stream is None:
        return
    line = f"{text}\n".encode(stream.encoding, "backslashreplace")
    with contextlib.suppress(OSError):
        os.write(stream.fileno(), line)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
