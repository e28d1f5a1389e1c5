"""Log lines as JSON (WARMQ_LOG_FORMAT=json); docs/reference/observing.md lists the fields."""

import datetime as dt
import logging
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType

import orjson

#: Further fields of a line, given to the logger as `extra`.
FIELDS = ("action", "request_id", "batch_id", "trace_id")
#: The FIELDS of this thread or task.
_CONTEXT: ContextVar[Mapping[str, str]] = ContextVar("log_fields", default=MappingProxyType({}))


def set_log_fields(**fields: str) -> None:
    """Add these of FIELDS to each line of this thread or task from now on."""
    _CONTEXT.set({**_CONTEXT.get(), **fields})


class JsonLines(logging.Formatter):
    """Writes time (UTC), level, logger, process, message, FIELDS and a traceback as one line."""

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
        context = _CONTEXT.get()
        for name in FIELDS:
            if value := getattr(record, name, None) or context.get(name):
                line[name] = _text(str(value))
        if record.exc_info:
            line["exception"] = _text(self.formatException(record.exc_info))
        return orjson.dumps(line).decode()


def as_json(handlers: Iterable[logging.Handler]) -> None:
    """Let these handlers write JSON lines from now on."""
    for handler in handlers:
        handler.setFormatter(JsonLines())


def set_up(log_format: str, text: str, level: int = logging.INFO) -> None:
    """Log to stderr from now on: as JSON, or in the format `text`."""
    logging.basicConfig(level=level, format=text)
    if log_format == "json":
        as_json(logging.root.handlers)


def _text(text: str) -> str:
    """Return text that can be JSON: half of a surrogate pair cannot."""
    return text.encode(errors="replace").decode()
