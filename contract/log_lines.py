"""Log lines as JSON, one object a line, where WARMQ_LOG_FORMAT=json asks for it.

docs/reference/observing.md lists the fields, and the words that `action` can be.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType

import orjson

#: What a line may say beside its text, given to the logger as `extra`.
FIELDS = ("action", "request_id", "batch_id", "trace_id")


#: What a thread or task works on: of FIELDS, in each line that it logs.
_AT_HAND: ContextVar[Mapping[str, str]] = ContextVar("at_hand", default=MappingProxyType({}))


def set_log_fields(**fields: str) -> None:
    """Say these of FIELDS in each line that this thread or task logs from now on, beside those
    said before; a line's own `extra` goes first."""
    _AT_HAND.set({**_AT_HAND.get(), **fields})


class JsonLines(logging.Formatter):
    """Writes a record as one line: time (UTC), level, logger, process, message, and what it has of
    FIELDS; `exception` is a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its break."""
        at = dt.datetime.fromtimestamp(record.created, dt.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": _text(record.getMessage()),
        }
        work = _AT_HAND.get()
        for name in FIELDS:
            if value := getattr(record, name, None) or work.get(name):
                line[name] = _text(str(value))
        if record.exc_info:
            line["exception"] = _text(self.formatException(record.exc_info))
        return orjson.dumps(line).decode()


def as_json(handlers: Iterable[logging.Handler]) -> None:
    """Let these handlers write such lines from now on."""
    for handler in handlers:
        handler.setFormatter(JsonLines())


def set_up(log_format: str, text: str, level: int = logging.INFO) -> None:
    """Log to stderr, in this process from now on: as JSON, or as `text` says."""
    logging.basicConfig(level=level, format=text)
    if log_format == "json":
        as_json(logging.root.handlers)


def _text(text: str) -> str:
    """Return text that can be JSON: half of a surrogate pair cannot."""
    return text.encode(errors="replace").decode()
