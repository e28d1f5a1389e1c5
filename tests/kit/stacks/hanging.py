"""Workers that end by themselves, and whoever starts them again."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kit.stacks.stage import Stage

from demo.stack import Worker


@contextmanager
def supervised(
    on: Stage, start: Callable[..., Worker] | None = None, **settings: object
) -> Iterator[None]:
    """Start a worker, and another whenever one has ended, as systemd does."""
    over, start = threading.Event(), start or on.worker

    def keep() -> None:
        while not over.is_set():
            process = start(stall_timeout_s=5, **settings).process
            assert process is not None
            while process.poll() is None and not over.wait(0.1):
                pass

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def exit_codes(on: Stage) -> list[int]:
    codes = [w.process.poll() for w in on.workers if w.process is not None]
    return [code for code in codes if code is not None]


def hung_processes(on: Stage) -> set[int]:
    """Return the pids of which the logs say that their loop stood."""
    logs = "".join(worker.log_path.read_text() for worker in on.workers)
    return {int(pid) for pid in re.findall(r"loop in process (\d+) has been blocked for 5 s", logs)}
