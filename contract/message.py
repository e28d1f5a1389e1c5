"""Writes and reads messages in Redis: Celery's protocol 2, as producers send and workers read.

kombu's encoder takes 26 to 430 µs a message, this one 2 µs. The body is plain text (`body_encoding:
utf-8`), which is 5 % smaller than base64, and readable in Redis.
"""

from __future__ import annotations

import base64
import datetime as dt
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import orjson
from msgspec import Struct

from contract.compression import inflated
from contract.errors import RequestRejected
from contract.naming import LISTENER, TASK_NAME, priority_step
from contract.openai.decode import decode, printable

#: What follows the args in a message's body: no kwargs, and no options of Celery (`embed`).
_EMBED = b',{},{"callbacks":null,"errbacks":null,"chain":null,"chord":null}]'

#: The text between a message's body and its request id.
_HEAD = (
    b',"content-encoding":"utf-8","content-type":"application/json","headers":{"lang":"py",'
    b'"task":"' + TASK_NAME.encode() + b'","argsrepr":"","kwargsrepr":"","origin":"warmq",'
    b'"eta":null,"expires":null,"group":null,"parent_id":null,"retries":0,'
    b'"timelimit":[null,null],"id":"'
)

#: What precedes the arguments in a message of MessageWriter. Quotes within a JSON string are
#: escaped, so the arguments cannot contain what follows them, the beginning of _HEAD.
_BEFORE_ARGS, _AFTER_ARGS = b'{"body":', b',"content-encoding"'
#: Form of what follows _HEAD there: request id, line, url, custom_id as JSON.
_ORIGIN = re.compile(
    rb'([^"]+)","root_id":"[^"]+","warmq":\{(?:"sequences":\d+,)?"line":(\d+),"url":"([^"]+)",'
    rb'"custom_id":("(?:[^"\\]|\\.)*+")'
)


def encode_args(body: bytes) -> bytes:
    """Return the JSON string that is the first field of a message with this request body."""
    return orjson.dumps((b"[[" + body + b"]" + _EMBED).decode())


def args_in(message: bytes) -> bytes:
    """Return what `encode_args` has written into a message of MessageWriter."""
    return message[len(_BEFORE_ARGS) : message.index(_AFTER_ARGS)]


class Written(NamedTuple):
    """A message of MessageWriter: its request's id, url and body, and its line in the file.

    `line` is the number's digits; `custom_id` is JSON.
    """

    request_id: bytes
    url: str
    body: dict[str, Any]
    line: bytes
    custom_id: bytes


def read_written(message: bytes, args: bytes) -> Written:
    """Read a message that MessageWriter has just written; `args` are the arguments in it."""
    found = _ORIGIN.match(message, len(_BEFORE_ARGS) + len(args) + len(_HEAD))
    assert found is not None  # noqa: S101 - MessageWriter has written it
    request_id, line, url, custom_id = found.groups()
    body: dict[str, Any] = orjson.loads(orjson.loads(args))[0][0]
    return Written(request_id, url.decode(), body, line, custom_id)


class MessageWriter:
    """Writes the messages of one batch; the text that all have in common is encoded once."""

    def __init__(
        self,
        batch_id: str,
        created: int,
        life: str,
        queue: str,
        priority: int,
        deadline: float | None = None,
        trace: str = "",
    ) -> None:
        """Prepare; `trace` is the batch's traceparent, to which traces of its requests link."""
        traced = b',"traceparent":' + orjson.dumps(trace) if trace else b""
        self._tail = (
            b',"batch":' + orjson.dumps(batch_id) + b',"created":"%d"' % created
            + b',"life":' + orjson.dumps(life)
            + b',"deadline":' + orjson.dumps(deadline)
            + b',"v":1}' + traced
            + b'},"properties":{"delivery_mode":2,"priority":%d' % priority
            + b',"delivery_info":{"exchange":"","routing_key":' + orjson.dumps(queue)
            + b'},"body_encoding":"utf-8","reply_to":"","correlation_id":"'
        )  # fmt: skip

    def write(
        self, request_id: str, custom_id: str | None, line: int, url: str, body: bytes,
        sequences: int = 1,
    ) -> bytes:  # fmt: skip
        """Return one message; `body` is the request body as JSON, run as `sequences` sequences."""
        # Without this field POP need not decode the message.
        many = b'"sequences":%d,' % sequences if sequences > 1 else b""
        rid = request_id.encode()
        return b"".join((
            _BEFORE_ARGS, encode_args(body), _HEAD, rid, b'","root_id":"', rid,
            b'","warmq":{', many, b'"line":%d,"url":"' % line, url.encode(),
            b'","custom_id":', orjson.dumps(custom_id), self._tail, rid,
            b'","delivery_tag":"', rid, b'"}}',
        ))  # fmt: skip


def write_online(
    request_id: str,
    url: str,
    body: bytes,
    *,
    queue: str,
    priority: int,
    tenant: str,
    deadline: float,
    keep_ms: int,
    listener: str = "",
    trace: Mapping[str, str] | None = None,
    sequences: int = 1,
) -> bytes:
    """Return the message of an online request, which has no batch.

    `body` is the request body as JSON. `deadline` is in seconds since 1970. `keep_ms` is the
    result's time to live. The process `listener` receives the text while the request runs
    (contract/streaming.py). `sequences` comes from contract/openai/amounts.py. `trace` has the W3C
    headers of the trace that the worker continues.
    """
    ours = {"url": url, "tenant": tenant, "deadline": deadline, "keep_ms": keep_ms, "v": 1}
    if listener:
        ours["listener"] = listener
    if sequences > 1:
        ours["sequences"] = sequences
    traced = b"," + orjson.dumps(trace)[1:-1] if trace else b""
    rid = request_id.encode()
    return b"".join((
        _BEFORE_ARGS, encode_args(body), _HEAD, rid, b'","root_id":"', rid, b'","warmq":',
        orjson.dumps(ours), traced, b'},"properties":{"delivery_mode":2,"priority":%d' % priority,
        b',"delivery_info":{"exchange":"","routing_key":', orjson.dumps(queue),
        b'},"body_encoding":"utf-8","reply_to":"","correlation_id":"', rid,
        b'","delivery_tag":"', rid, b'"}}',
    ))  # fmt: skip


class Delivery(Struct):
    """One hand-over of a message to this worker.

    `created` is the batch's creation time in ms as text, or that of the request's last retry;
    `requeued_at` is the time at which a cancelled batch was queued again as a whole, 0 if it was
    not. `life` is the random text made with the batch.
    `content` is a hash of the message's body, `size` the message's bytes. `deadline` is in seconds
    since 1970. `returns` counts the request's earlier deliveries, `deaths` those in which it was in
    an engine that died. A request without a batch may have `keep_ms`, its result's time to live
    (None: the default), and `listener`, the process that receives its text while it runs. `trace`
    has the W3C headers of the trace that the engine continues; None: the request is not traced.
    `tenant` is in the name of the list from which the message was taken. `priority` is kombu's step
    of the message's priority: 0 (highest), 3, 6 or 9.
    """

    lease: str
    request_id: str
    task: str
    batch: str
    created: str
    life: str
    content: int
    custom_id: str | None
    line: int | None
    url: str | None
    deadline: float | None
    ignore_result: bool
    headers: dict[str, Any]
    message: dict[str, Any]
    returns: int = 0
    deaths: int = 0
    size: int = 0
    keep_ms: int | None = None
    listener: str = ""
    priority: int = 0
    trace: Mapping[str, str] | None = None
    tenant: str = ""
    requeued_at: int = 0

    @property
    def attempt(self) -> int:
        """The number of this delivery, from 1."""
        return self.returns + 1

    def same_request(self, other: Delivery) -> bool:
        """Return whether `other` delivers the same request: the same id, batch life and body."""
        return (self.request_id, self.batch, self.life, self.content) == (
            other.request_id,
            other.batch,
            other.life,
            other.content,
        )


def read_delivery(lease: str, raw: bytes, returns: int = 0, deaths: int = 0) -> Delivery:
    """Decode a message, except its body; POP has already checked the message's form.

    Raises:
        RequestRejected: Python's JSON decoder, which is stricter than Lua's, refuses the message.
    """
    try:
        message = decode(raw)
        headers = message["headers"]
        ours = headers.get("warmq")
        ours = ours if isinstance(ours, dict) else {}
        return Delivery(
            # In the order of the fields: their names would take a fifth of this function's time.
            lease,
            headers["id"],
            _text(headers.get("task")) or "",
            _text(ours.get("batch")) or "",
            _text(ours.get("created")) or "",
            _text(ours.get("life")) or "",
            hash(message["body"]),
            _text(ours.get("custom_id")),
            _integer(ours.get("line")),
            _text(ours.get("url")),
            _deadline(ours.get("deadline"), headers.get("expires")),
            headers.get("ignore_result") is True,
            headers,
            message,
            returns,
            deaths,
            len(raw),
            # The tests with `in` save time: most messages have neither field.
            _integer(ours["keep_ms"]) if "keep_ms" in ours else None,
            _listener(ours["listener"]) if "listener" in ours else "",
            _step(message.get("properties")),
        )
    except (RequestRejected, KeyError, TypeError, AttributeError) as error:
        raise RequestRejected(f"unreadable message: {error}") from None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


#: The steps of kombu's priorities.
_STEPS = {priority: priority_step(priority) for priority in range(10)}


def _step(properties: object) -> int:
    # Without a usable priority it is the highest, as in suffix_of (contract/lua/message.lua).
    priority = properties.get("priority") if isinstance(properties, dict) else None
    if type(priority) is int and priority in _STEPS:
        return _STEPS[priority]
    return priority_step(max(0, priority)) if isinstance(priority, int | float) else 0


def _listener(value: object) -> str:
    return value if isinstance(value, str) and LISTENER.fullmatch(value) else ""


def _deadline(ours: object, expires: object) -> float | None:
    if ours is None and expires is None:
        return None
    numbers = (n for n in (ours, expires) if isinstance(n, int | float))
    times: list[float] = [n for n in numbers if not isinstance(n, bool)]
    if isinstance(expires, str):
        with suppress(ValueError):  # a text that is not a time is ignored
            when = dt.datetime.fromisoformat(expires)
            times.append(when.replace(tzinfo=when.tzinfo or dt.UTC).timestamp())
    return min(times, default=None)


def read_body(delivery: Delivery) -> dict[str, Any]:
    """Return the request body of a delivery.

    Raises:
        RequestRejected: the body is not JSON, or has Celery options that warmq does not support.
    """
    if delivery.task != TASK_NAME:
        raise RequestRejected(
            f"unknown task {printable(delivery.task)!r}; this queue serves {TASK_NAME}",
            code="unknown_task",
        )
    args, kwargs, embed = _read_content(delivery.message)
    options = ["eta/countdown"] if delivery.headers.get("eta") else []
    if isinstance(embed, dict) and any(embed.values()):
        options += [o for o in ("chord", "chain", "callbacks", "errbacks") if embed.get(o)]
    for option in options:
        raise RequestRejected(
            f"Celery option {option} is not supported by warmq; send the request when it should "
            "run",
            code="unsupported_option",
        )
    if kwargs:
        raise RequestRejected("keyword arguments are not used; pass the body as args=[body]")
    if not isinstance(args, list) or len(args) != 1 or not isinstance(args[0], dict):
        raise RequestRejected("pass exactly one argument, the request body: args=[{...}]")
    return args[0]


def inflate(delivery: Delivery, max_bytes: int) -> None:
    """Decompress a delivery's body; raises RequestRejected as `inflated` does."""
    text = inflated(delivery.message["body"], delivery.headers["compression"], max_bytes)
    # The properties name the encoding of the compressed body.
    delivery.message |= {"body": text, "properties": {}}


def _read_content(message: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return Celery's (args, kwargs, embed)."""
    if message.get("content-type") != "application/json":
        name = printable(_text(message.get("content-type")) or "")
        raise RequestRejected(f"content type {name!r}: only application/json is accepted")
    try:
        text = message["body"]
        if (message["properties"].get("body_encoding") or "utf-8").lower() == "base64":
            text = base64.b64decode(text, validate=True)
        args, kwargs, embed = decode(text if isinstance(text, bytes) else text.encode())
    except (RequestRejected, LookupError, ValueError, TypeError, AttributeError) as error:
        raise RequestRejected(f"unreadable message body: {error}") from None
    return args, kwargs, embed
