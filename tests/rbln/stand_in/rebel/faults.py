"""The tests' side door: faults that are switched on in a running engine, and a record of steps.

WARMQ_TEST_REBEL names a folder. Files in it: `raise` and `refuse-load` hold the message of the
error that every step or every runtime's creation raises; `hang` makes both wait while it is
there; `slow` holds the seconds that a step takes more. `steps` gets one line per step:
`prefill 1 1` or `decode <compiled rows> <rows that hold a request>`.
"""

import os
import time
from pathlib import Path

_FOLDER = Path(os.environ["WARMQ_TEST_REBEL"]) if "WARMQ_TEST_REBEL" in os.environ else None
POLL_S = 0.05


def _told(name):
    if _FOLDER is None:
        return None
    try:
        return (_FOLDER / name).read_text().strip()
    except FileNotFoundError:
        return None


def on_load():
    _wait()
    if (message := _told("refuse-load")) is not None:
        raise RuntimeError(message)


def on_step():
    _wait()
    if (message := _told("raise")) is not None:
        raise RuntimeError(message)
    if (seconds := _told("slow")) is not None:
        time.sleep(float(seconds))


def _wait():
    while _told("hang") is not None:
        time.sleep(POLL_S)


def record(names, tensors):
    if _FOLDER is None or "input_ids" not in names:
        return
    given = dict(zip(names, tensors, strict=True))
    rows, width = given["input_ids"].shape
    if width > 1:
        line = f"prefill {rows} {rows}"
    else:
        # A request that decodes has at least one token behind it; padding stands at 0.
        line = f"decode {rows} {int((given['cache_position'].reshape(rows, -1)[:, 0] > 0).sum())}"
    with (_FOLDER / "steps").open("a") as file:
        file.write(line + "\n")
