"""Terminal results: Celery's meta as it is stored, OpenAI's line as users read it."""

import datetime as dt
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import orjson

from contract.errors import RequestFailed, RequestRejected, WarmqError
from contract.message import Delivery

#: Outcomes as the batch counters name them.
OUTCOMES = ("completed", "failed", "cancelled", "expired")


#: Ends of lines to `str.splitlines`, hence to the SDK's `iter_lines`; JSON allows them in texts.
_SEPARATORS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def one_line(text: bytes) -> bytes:
    """Return JSON with those letters escaped that some readers of lines take for a line's end."""
    if not text.isascii():
        for letter, escaped in _SEPARATORS:
            text = text.replace(letter, escaped)
    return text


def success_meta(delivery: Delivery, body: bytes, timing: dict[str, float | int]) -> bytes:
    """Return the stored form of a success; `body` is the response's JSON, spliced in as it is."""
    rid = orjson.dumps(delivery.request_id)
    return b"".join((
        b'{"status":"SUCCESS","result":', body, b',"traceback":null,"children":[],"date_done":',
        orjson.dumps(dt.datetime.now(dt.UTC)), b',"task_id":', rid, b',"warmq":',
        orjson.dumps(_warmq(delivery.batch, delivery.custom_id, delivery.line, None, timing)), b"}",
    ))  # fmt: skip


def failure_meta(
    request_id: str,
    error: WarmqError,
    *,
    batch: str = "",
    custom_id: str | None = None,
    line: int | None = None,
    timing: dict[str, float | int] | None = None,
    revoked: bool = False,
) -> bytes:
    """Return the stored form of a failure, or of a revocation (cancelled, expired).

    `exc_module` is null for our own classes, so that a Celery client that does
    not have warmq installed still gets an exception of that name.
    """
    shown: dict[str, Any] = {"code": error.code, "message": error.message}
    if isinstance(error, RequestRejected) and error.field:
        shown["param"] = error.field
    if line is not None:
        shown["line"] = line
    return orjson.dumps({
        "status": "REVOKED" if revoked else "FAILURE",
        "result": {
            "exc_type": "TaskRevokedError" if revoked else type(error).__name__,
            "exc_message": [error.message],
            "exc_module": "celery.exceptions" if revoked else None,
        },
        "traceback": None,
        "children": [],
        "date_done": dt.datetime.now(dt.UTC),
        "task_id": request_id,
        "warmq": _warmq(batch, custom_id, line, shown, timing),
    })  # fmt: skip


def _warmq(
    batch: str, custom_id: str | None, line: int | None, error: object, timing: object
) -> dict[str, Any]:
    return dict(batch=batch or None, custom_id=custom_id, line=line, error=error, timing=timing)


@dataclass(slots=True)
class ResultLine:
    """One output line; `failed` says which file it belongs in, `rejected` that its author must
    change the request."""

    json: bytes
    failed: bool
    rejected: bool = False


#: Of a line, from 1; every program that reads the output can hold it.
_Line = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Error(msgspec.Struct):
    code: str
    message: str
    param: str | None = None
    line: _Line | msgspec.UnsetType = msgspec.UNSET


class _Ours(msgspec.Struct):
    """What `warmq` is in a result, as far as anybody uses it."""

    error: _Error | None = None
    timing: dict[str, float] | None = None
    custom_id: str | None = None
    line: _Line | None = None


def read_meta(raw: bytes) -> dict[str, Any]:
    """Decode a stored or published result; a value of another program reads as a failure.

    Whatever it was, `status` is a text, `warmq` and each of its parts None or as `success_meta` and
    `failure_meta` write it, and all of it can be written as JSON again.
    """
    try:
        meta = orjson.loads(raw)
        orjson.dumps(meta)  # which refuses what is nested deeper than 254 levels
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        meta = None
    if not (isinstance(meta, dict) and isinstance(meta.get("status"), str)):
        return {"status": "FAILURE", "result": "the stored result cannot be read"}
    if "warmq" in meta:
        meta["warmq"] = _usable(meta["warmq"])
    return meta


def _usable(ours: object) -> dict[str, Any] | None:
    if not isinstance(ours, dict):
        return None
    if not _is_ours(ours):
        for name, part in ours.items():
            ours[name] = part if _is_ours({name: part}) else None
    return ours


def _is_ours(parts: dict[str, Any]) -> bool:
    try:
        msgspec.convert(parts, _Ours)
    except msgspec.ValidationError:
        return False
    return True


def outcome_of(meta: dict[str, Any]) -> str:
    """Return the counter a result belongs to, as `read_meta` returned it."""
    if meta["status"] == "SUCCESS":
        return "completed"
    code = ((meta.get("warmq") or {}).get("error") or {}).get("code")
    return code if code in ("cancelled", "expired") else "failed"


class _Warmq(msgspec.Struct):
    timing: msgspec.Raw
    custom_id: str | None = None
    line: int | None = None


class _Success(msgspec.Struct):
    """What `success_meta` writes, as far as an output line needs it."""

    status: Literal["SUCCESS"]
    result: msgspec.Raw
    warmq: _Warmq


_decode_success = msgspec.json.Decoder(_Success).decode
#: Of JSON that is nested deeper than Python's stack it says RecursionError.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def body_of(raw: bytes) -> bytes | None:
    """Return the response's JSON in a stored success, not decoded; None for any other result."""
    try:
        meta = _decode_success(raw)
        body = bytes(meta.result)
        body.decode()  # msgspec does not look into what it passes over
    except _UNREADABLE:
        return None
    return body


def error_of(raw: bytes) -> WarmqError:
    """Return the error that a stored result other than a success tells."""
    meta = read_meta(raw)
    result, ours = meta.get("result"), meta.get("warmq") or {}
    told = ours.get("error") or {"message": str(result), "code": "request_failed"}
    message, code = str(told.get("message")), str(told.get("code"))
    if isinstance(result, dict) and result.get("exc_type") == "RequestRejected":
        return RequestRejected(message, code=code, field=told.get("param"))
    return RequestFailed(message, code=code)


def _plain_line(
    request_id: str,
    raw: bytes,
    custom_id: str | None = None,
    line: int | None = None,
    leader: str = "",
) -> ResultLine | None:
    """Return the line of a success that warmq wrote, without decoding its body; None for others.

    custom_id and line are the result's own if they are not given.
    """
    try:
        meta = _decode_success(raw)
        body, rid = bytes(meta.result), request_id.encode()
        ran, same_as = rid, b""
        if leader:
            ran = leader.encode()
            same_as = b',"same_as":' + orjson.dumps(meta.warmq.custom_id)
        body.decode()  # msgspec does not look into what it passes over
    except _UNREADABLE:
        return None
    if line is None:
        custom_id, line = meta.warmq.custom_id, meta.warmq.line
    if line is None or custom_id is None or b"\n" in body:
        return None
    out = b"".join((
        b'{"id":"batch_req_', rid, b'","custom_id":', orjson.dumps(custom_id),
        b',"response":{"status_code":200,"request_id":"', ran, b'","body":', body,
        b'},"error":null,"warmq":{"line":%d,"timing":' % line, bytes(meta.warmq.timing),
        same_as, b"}}",
    ))  # fmt: skip
    return ResultLine(one_line(out), False)


def result_line(
    request_id: str, custom_id: str, line: int, raw: bytes | None, leader: str = ""
) -> ResultLine:
    """Return OpenAI's batch output line for a stored result, or for a lost one.

    With `leader`, a request id, the result is that request's, and the line says so (`same_as`).
    """
    plain = _plain_line(request_id, raw, custom_id, line, leader) if raw is not None else None
    return plain or _any_line(request_id, custom_id, line, raw, leader)


def stored_line(request_id: str, raw: bytes) -> ResultLine | None:
    """Return the line with the result's own custom_id and number; None if it has none."""
    if plain := _plain_line(request_id, raw):
        return plain
    ours = read_meta(raw).get("warmq") or {}
    custom_id, line = ours.get("custom_id"), ours.get("line")
    if custom_id is None or line is None:
        return None
    return _any_line(request_id, custom_id, line, raw)


def _any_line(
    request_id: str, custom_id: str, line: int, raw: bytes | None, leader: str = ""
) -> ResultLine:
    out: dict[str, Any] = {"id": f"batch_req_{request_id}", "custom_id": custom_id}
    out |= {"response": None, "error": None}
    error: dict[str, Any] = {
        "code": "result_expired", "message": "the result was collected too late"
    }  # fmt: skip
    same_as: dict[str, Any] = {}
    rejected = False
    if raw is not None:
        meta = read_meta(raw)
        ours, body = meta.get("warmq") or {}, meta.get("result")
        if leader:
            same_as = {"same_as": ours.get("custom_id")}
        if meta["status"] == "SUCCESS":
            ran = leader or request_id
            out["response"] = {"status_code": 200, "request_id": ran, "body": body}
            out["warmq"] = {"line": line, "timing": ours.get("timing")} | same_as
            return ResultLine(one_line(orjson.dumps(out)), False)
        error = ours.get("error") or {"code": "request_failed", "message": str(body)}
        rejected = isinstance(body, dict) and body.get("exc_type") == RequestRejected.__name__
    own = {"line": line} if leader else {}  # the leader's error may name the leader's line
    out["error"] = {"line": line, **error, **own, **same_as}
    return ResultLine(one_line(orjson.dumps(out)), True, rejected)
