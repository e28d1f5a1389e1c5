"""Writes a worker's memory and the last lines of its log into Redis, for the gateway's page."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress

import orjson

from worker.drain.announcement import without_secrets
from worker.drain.drain import Drain
from worker.drain.scripts import ERRORS
from worker.machine.devices import machine
from worker.machine.gpu_memory import gpu_memory

#: Seconds between two writes, and milliseconds after which the report expires.
EVERY_S, KEPT_MS = 5.0, 60_000
#: Most lines, and most characters of each.
LINES, CHARACTERS = 20, 200
#: The packages of warmq: other loggers may log prompts.
_LOGGERS = ("worker", "contract")


class RecentLines(logging.Handler):
    """Keeps the last log lines of warmq, without the texts of those that may quote a request."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: deque[tuple[float, str, str]] = deque(maxlen=LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's time, level and text."""
        text, action = record.getMessage(), getattr(record, "action", "")
        if request_id := getattr(record, "request_id", None):
            text = f"request {request_id}: {action}"
        elif action == "engine_log":
            text = "a line of the engine's log"
        self.lines.append((record.created, record.levelname, text))

    def __enter__(self) -> RecentLines:
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self)


def report(drain: Drain, recent: RecentLines) -> bytes:
    """Return used and total memory of host and GPUs in bytes, and the last log lines, as JSON."""
    host, gpus = machine(), gpu_memory()
    log = [
        (at, level, without_secrets(text, drain.settings)[:CHARACTERS])
        for at, level, text in list(recent.lines)
    ]
    memory = {"host": host, "device": gpus}
    used = {name: [one.total - one.free, one.total] for name, one in memory.items() if one}
    return orjson.dumps(used | {"log": log})


async def report_machine(drain: Drain, recent: RecentLines) -> None:
    """Write the report every EVERY_S until cancelled."""
    while True:
        # In a thread: the GPUs' driver may answer late.
        text = await asyncio.to_thread(report, drain, recent)
        with suppress(*ERRORS):  # other commands of the drain report the outage
            await drain.leases.note_machine(text, KEPT_MS)
        await asyncio.sleep(EVERY_S)
