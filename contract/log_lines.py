"""Writes log lines as JSON (WARMQ_LOG_FORMAT=json).

docs/reference/observing.md describes the fields of a line.
"""

import datetime as dt
import logging
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType

import orjson

#: The names of further fields of a line, which a logger gets as `extra`.
FIELDS = ("action", "request_id", "batch_id", "trace_id")
#: The values of FIELDS for all lines of this thread or task.
_CONTEXT: ContextVar[Mapping[str, str]] = ContextVar("log_fields", default=MappingProxyType({}))


def set_log_fields(**fields: str) -> None:
    """Add these fields, named in FIELDS, to each line of this thread or task from now on."""
    _CONTEXT.set({**_CONTEXT.get(), **fields})


class JsonLines(logging.Formatter):
    """Writes a log record as one JSON line: time (UTC), level, message, FIELDS and more."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a line break at its end."""
        at = dt.datetime.fromtimestamp(record.created, dt.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": _text(record.getMessage()),
        }
        context = _CONTEXT.get()
        for name in FIELDS:
            if value := getattr(record, name, None) or context.get(name):
                line[name] = _text(str(value))
        if record.exc_info:
            line["exception"] = _text(self.formatException(record.exc_info))
        return orjson.dumps(line).decode()


def as_json(handlers: Iterable[logging.Handler]) -> None:
    """Make these handlers write JSON lines from now on."""
    for handler in handlers:
        handler.setFormatter(JsonLines())


def set_up(log_format: str, text: str, level: int = logging.INFO) -> None:
    """Log to stderr from now on: as JSON if `log_format` is json, else in the format `text`."""
    logging.basicConfig(level=level, format=text)
    if log_format == "json":
        as_json(logging.root.handlers)


def _text(text: str) -> str:
    """Return the text with half surrogate pairs replaced, which JSON cannot have."""
    return text.encode(errors="replace").decode()
