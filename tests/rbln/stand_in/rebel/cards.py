"""The emulated cards of this machine: their name, which of them are visible, who holds one.

WARMQ_TEST_REBEL_CARDS names a folder that all processes share: in it each card is a file, locked
by the process that has it and holding its process id.
"""

import fcntl
import os
from pathlib import Path

NAME = os.environ.get("WARMQ_TEST_REBEL_NPU", "RBLN-CA25")
VISIBLE = (os.environ.get("RBLN_VISIBLE_DEVICES") or "0").split(",")
_FOLDER = os.environ.get("WARMQ_TEST_REBEL_CARDS")
_held = {}  # number -> open file: its lock goes with the process, as a card does


def take():
    """Take the visible cards for this process, or fail as where another has them."""
    if _FOLDER is None:
        return
    for number in VISIBLE:
        if number in _held:
            continue
        card = os.open(Path(_FOLDER, number), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(card, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(card)
            raise RuntimeError("SYS_EBUSY: Lack of device memory. (code: -16)") from None
        os.truncate(card, 0)
        os.write(card, str(os.getpid()).encode())
        _held[number] = card
