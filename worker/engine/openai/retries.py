"""What is done when a server does not answer a request: one table.

docs/engine-openai.md shows the same table; a test compares them.
"""

import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

import orjson

from contract.errors import RequestRejected
from worker.engine.remote.server import Health

#: How often a request is sent before faults that may be its own end it.
ATTEMPTS = 3
#: A server may ask for more, but is asked again after so long.
LONGEST_RETRY_AFTER_S = 600.0

#: The code of a request that does not fit, and what servers without it say.
TOO_LONG, TOO_LONG_TEXTS = "context_length_exceeded", ("context length", "max_model_len")


class Action(StrEnum):
    """What is done, in the words of the table."""

    REJECT = "rejected: the line's error, with the server's words"
    CLOSED = "the server counts as away; when all do, requests go back and the worker ends"
    WAIT = "the server is left alone as long as it says, then asked again; not counted"
    PROBE = "the server's health is asked, and decides (below)"
    COUNT = f"sent again, {ATTEMPTS} times in all, then failed"
    AWAY = "sent to another server; with none left it goes back to the queue; not counted"
    DIED = "sent to another server once; else back to the queue, and one death is counted"


class Condition(StrEnum):
    """What happened where there is no HTTP status."""

    CONNECT = "no connection"
    LOST = "connection lost, or the answer ends early"
    STALLED = "no step for WARMQ_STALL_TIMEOUT_S"
    GARBLED = "a response that cannot be read"
    ENDED = "finish_reason `abort`: the server was told to end"


#: Statuses that a server gives again to the same request. 402 is about an account, as 401 is.
_REFUSALS = sorted(set(range(400, 500)) - {401, 402, 403, 408, 409, 425, 429})
#: What happened, in the words of the table; the HTTP statuses (also those inside a stream's error
#: event) and conditions that it stands for; what is done.
TABLE: tuple[tuple[str, tuple[int | Condition, ...], Action], ...] = (
    ("501; 400, 404 and other 4xx that are not below", (*_REFUSALS, 501), Action.REJECT),
    ("401, 403: the key is refused", (401, 403), Action.CLOSED),
    ("408, 409, 425, 429; 503 with Retry-After", (408, 409, 425, 429), Action.WAIT),
    ("503 without Retry-After, 500, 502, 504, other 5xx", (500, 502, 503, 504), Action.PROBE),
    (Condition.CONNECT, (Condition.CONNECT,), Action.AWAY),
    (Condition.LOST, (Condition.LOST,), Action.PROBE),
    (Condition.STALLED, (Condition.STALLED,), Action.PROBE),
    (Condition.ENDED, (Condition.ENDED,), Action.AWAY),
    ("any other status; " + Condition.GARBLED, (Condition.GARBLED,), Action.COUNT),
)


@dataclass(eq=False)
class Unanswered(Exception):
    """A server did not answer one request.

    `what` is the HTTP status or what happened instead; `inside`: the server had begun to answer;
    `wait_s`: the pause in seconds that it asked for; `error`: the error object of its response.
    """

    what: int | Condition
    message: str
    inside: bool = False
    wait_s: float | None = None
    error: dict[str, Any] = field(default_factory=dict)

    def action(self) -> Action:
        """Look up what is done."""
        if self.what == 503 and self.wait_s is not None:
            return Action.WAIT
        for _, meant, action in TABLE:
            if self.what in meant:
                return action
        return Action.PROBE if isinstance(self.what, int) and self.what >= 500 else Action.COUNT

    def after_probe(self, health: Health) -> Action:
        """Return what PROBE comes to.

        Only a request that was inside (its answer had begun) may have brought a server down,
        and one that cannot be reached may be well.
        """
        if health is not Health.WELL or self.what == Condition.STALLED:
            blamed = self.inside and health is not Health.SILENT
            return Action.DIED if blamed else Action.AWAY
        return Action.WAIT if self.what == 503 else Action.COUNT  # 503, well: it has too much to do

    def rejection(self) -> RequestRejected:
        """Return the line's error, if this is a refusal."""
        if self.what == 404 and "model" not in self.message.lower():
            return RequestRejected(
                f"field url: the server's model does not serve it ({self.message}); send the "
                "request to the queue of a model that does",
                code="unknown_url",
                field="url",
            )
        code = "invalid_request"
        if self.what == 404:
            code = "model_not_found"
        elif self.error.get("code") == TOO_LONG or any(it in self.message for it in TOO_LONG_TEXTS):
            code = TOO_LONG
        param = self.error.get("param")
        return RequestRejected(self.message, code=code, field=str(param) if param else None)


def unanswered(status: int, body: bytes, retry_after: str | None = None) -> Unanswered:
    """Read an error response: OpenAI's `{"error": {...}}`, FastAPI's `{"detail": ...}` or text."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = body.decode(errors="replace")[:500]
    error = found.get("error", found) if isinstance(found, dict) else {"message": str(found)}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    message = str(error.get("message") or error.get("detail") or f"status {status}")
    return Unanswered(status, message, wait_s=seconds_of(retry_after), error=error)


def seconds_of(retry_after: str | None) -> float | None:
    """Return a Retry-After header, seconds or an HTTP date, as seconds; None if it is neither."""
    if not retry_after:
        return None
    if retry_after.strip().isdecimal():
        seconds = float(retry_after)
    else:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(0.0, seconds), LONGEST_RETRY_AFTER_S)
