"""Lists the action for each fault (a failure of a server to answer a request).

docs/reference/engine-openai.md contains the same table; a test compares the two.
"""

import re
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import orjson

from contract.errors import RequestRejected
from worker.engine.remote.servers import Health

#: Seconds of the longest Retry-After that is obeyed; a longer one is shortened to this.
LONGEST_RETRY_AFTER_S = 600.0

#: The error code of a request that exceeds the context, and texts by which servers without that
#: code report it.
TOO_LONG, TOO_LONG_TEXTS = "context_length_exceeded", ("context length", "max_model_len")


class Action(StrEnum):
    """The actions on a fault; the values are the texts of the table."""

    REJECT = "rejected: the line's error, with the server's words"
    WAIT = (
        "the server rests (gets no requests) as long as it asks, then the request is sent again; "
        "not counted"
    )
    PROBE = "the server's health decides (below)"
    DOUBT = (
        "sent again; the server rests, or the failure counts against the request, if other "
        "requests succeed (below)"
    )
    MOVE = "sent to another server; with none left it goes back to the queue; not counted"
    DIED = "sent to another server once; else back to the queue, and one death is counted"


class Condition(StrEnum):
    """Failures without an HTTP status; the values are the texts of the table."""

    CONNECT = "no connection"
    LOST = "connection lost, or the answer ends early"
    STALLED = "no step for WARMQ_STALL_TIMEOUT_S"
    GARBLED = "a response that cannot be read"
    ENDED = "finish_reason `abort`: the server was shut down"


#: HTTP statuses that a server gives only to a bad request, and at each try of it.
_REFUSALS = (400, 413, 414, 415, 422, 431, 451, 501)
#: HTTP statuses of a missing endpoint; an ingress sends them, too.
MISSING = (404, 405)
#: The table: a description of the faults; their HTTP statuses and conditions; the action. An error
#: in an answer of status 200 is in the table under the HTTP status that it means.
TABLE: tuple[tuple[str, tuple[int | Condition, ...], Action], ...] = (
    (
        "400, 413, 414, 415, 422, 431, 451, 501, each with an error in words",
        _REFUSALS,
        Action.REJECT,
    ),
    (
        "404, 405 with an error in OpenAI's form, if this server has answered other urls, but "
        "never this one",
        (),
        Action.REJECT,
    ),
    (
        "402, 408, 409, 425, 429, 529; 503 with Retry-After; words of a rate limit, of too much "
        "load or of an empty account",
        (402, 408, 409, 425, 429, 529),
        Action.WAIT,
    ),
    ("503 without Retry-After, 500, 502, 504, other 5xx", (500, 502, 503, 504), Action.PROBE),
    (Condition.CONNECT, (Condition.CONNECT,), Action.MOVE),
    (Condition.LOST, (Condition.LOST,), Action.PROBE),
    (Condition.STALLED, (Condition.STALLED,), Action.PROBE),
    (Condition.ENDED, (Condition.ENDED,), Action.MOVE),
    ("any other 404 or 405", MISSING, Action.DOUBT),
    (
        "401, 403, other 4xx; words about the key; redirects; any 4xx without an error object "
        "(an HTML body)",
        (401, 403, 407),
        Action.DOUBT,
    ),
    ("any other status; " + Condition.GARBLED, (Condition.GARBLED,), Action.DOUBT),
)
#: The actions by HTTP status or condition.
_ACTIONS = {what: action for _, meant, action in TABLE for what in meant}
#: Texts by which servers report, with any status, that they are busy or the account is empty.
NOT_NOW = re.compile(
    r"rate.?limit|(rate|usage|spend(ing)?|concurrency) limit|too.?many.?(concurrent.?)?requests"
    r"|throttl|quota|over.?(loaded|capacity)|at capacity|server.?(is.?)?busy"
    r"|(tokens|requests) per (second|min|minute|hour|day)|\b[TR]P[MD]\b"
    r"|(insufficient|low|negative).{0,8}(balance|credit|fund)|(balance|credit|fund)s?\b.{0,30}"
    r"(insufficient|too low|exhausted|exceeded|depleted)|out of (credit|fund)|payment.?required"
    r"|billing|(try|retry) again (later|in )|slow(ing)? down|no healthy (upstream|deployment)"
    r"|no deployments? available|temporarily unavailable|service.?unavailable"
    r"|loading model|model is (currently )?loading",
    re.IGNORECASE,
)
#: Texts of a vLLM server with --max-num-queued-reqs or --max-num-queued-tokens.
QUEUE_FULL = re.compile(r"busy and cannot accept new requests|prefill token backlog limit")
#: Texts about the API key, which is not part of the request.
KEY = re.compile(
    r"\b(api|access|subscription).?(key|token)|un(authori[sz]ed|authenticated)|authenticat|auth.?error"
    r"|credential|permission|forbidden|deactivated|suspended",
    re.IGNORECASE,
)
#: The text with which OpenAI reports, with status 429, that one request exceeds the rate limit.
TOO_LARGE = "request too large"
#: Most characters of an HTML page that an error text shows.
SHOWN = 200


@dataclass(eq=False)
class Unanswered(Exception):
    """A server did not answer one request.

    `what` is the HTTP status or the condition. `inside`: the server had begun to answer. `wait_s`
    is the number of seconds that the server asked the client to wait. `error` is the error object
    that the server sent, in OpenAI's or FastAPI's form.
    """

    what: int | Condition
    message: str
    inside: bool = False
    wait_s: float | None = None
    error: dict[str, Any] = field(default_factory=dict)

    def action(self) -> Action:
        """Return the action that the table gives for this fault."""
        limited = self.what != 413 and self._matches(NOT_NOW)  # 413 is about one request's size
        if limited or (self.what == 503 and self.wait_s is not None):
            return Action.WAIT
        is_5xx = isinstance(self.what, int) and self.what >= 500
        action = _ACTIONS.get(self.what, Action.PROBE if is_5xx else Action.DOUBT)
        return Action.DOUBT if action is Action.REJECT and not self.refuses else action

    def _matches(self, words: re.Pattern[str]) -> bool:
        """Whether the error matches this pattern, and names no field of the request."""
        if not isinstance(self.what, int) or self.param:
            return False
        kinds = " ".join(str(self.error.get(name) or "") for name in ("type", "code"))
        return bool(words.search(kinds) or words.search(self.message[:SHOWN]))

    def after_probe(self, health: Health) -> Action:
        """Return the action to take after PROBE, when the server's health is known.

        A request can have killed the server only if its answer had begun. A silent server may
        still be alive.
        """
        if health is Health.WELL:  # a healthy server that sends 503 is overloaded
            return Action.WAIT if self.what == 503 else Action.DOUBT
        return Action.DIED if self.inside and health is not Health.SILENT else Action.MOVE

    @property
    def queue_full(self) -> bool:
        """Whether a vLLM server's queue is full, which is not the request's fault."""
        return self.what == 503 and bool(QUEUE_FULL.search(self.message))

    @property
    def refuses(self) -> bool:
        """Whether the server itself refuses this request, with an error object."""
        return self.what in _REFUSALS and bool(self.error) and not self._matches(KEY)

    @property
    def lacks_url(self) -> bool:
        """Whether the API itself, not an ingress, reports that the url does not exist."""
        return self.what in MISSING and not self.error.keys().isdisjoint(("type", "code"))

    @property
    def param(self) -> str | None:
        """The field that the error names, or None. Some servers write it as "None" or "null"."""
        param = self.error.get("param")
        return str(param) if param and param not in ("None", "null") else None

    def rejection(self) -> RequestRejected:
        """Return the error that ends the request."""
        if self.what in MISSING and "model" not in self.message.lower():
            return RequestRejected(
                f"field url: the server's model does not serve it ({self.message}); send the "
                "request to the queue of a model that does",
                code="unknown_url",
                field="url",
            )
        code = "invalid_request"
        if self.what == 404:
            code = "model_not_found"
        elif self.error.get("code") == TOO_LONG or any(
            text in self.message for text in TOO_LONG_TEXTS
        ):
            code = TOO_LONG
        return RequestRejected(self.message, code=code, field=self.param)


def read_error(
    status: int, body: bytes, retry_after: str | None = None, location: str | None = None
) -> Unanswered:
    """Read an error response: OpenAI's `{"error": {...}}`, FastAPI's `{"detail": ...}` or text."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        content = page_text(body)
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0]  # Gemini sends the error object in a list
    error: dict[str, Any] = {}
    message = "" if isinstance(content, dict) else str(content)
    if isinstance(content, dict):
        named = content.get("error", content.get("detail"))
        if named is None:
            error = content if "error" in (content.get("object"), content.get("type")) else {}
            message = str(content.get("message") or "")
        else:
            error = named if isinstance(named, dict) else {"message": str(named)}
        message = str(error.get("message") or message or error.get("detail") or "")
    if location:
        parts = urlsplit(location)
        message = f"redirects to {parts.hostname or ''}{parts.path}"
    if str(status) not in message and not (error and message):
        message = f"status {status}{': ' if message else ''}{message}"
    if status == 429 and message.lower().startswith(TOO_LARGE):
        status = 413
    return Unanswered(status, message, wait_s=seconds_of(retry_after), error=error)


def page_text(body: bytes) -> str:
    """Return the beginning of an HTML page or text as one line without markup."""
    text = body[:4000].decode(errors="replace")
    if title := re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL):
        text = title[1]
    text = re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", text, flags=re.IGNORECASE | re.DOTALL)
    return " ".join(text.split())[:SHOWN]


def seconds_of(retry_after: str | None) -> float | None:
    """Return a Retry-After header in seconds; None if it is neither a number nor an HTTP date."""
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
