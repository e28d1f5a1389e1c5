"""Writes and reads final results: as Celery's meta in Redis, and as OpenAI's batch output line."""

import datetime as dt
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import orjson

from contract.errors import RequestFailed, RequestRejected, WarmqError
from contract.message import Delivery

#: The outcomes of requests; a batch's counters have these names.
OUTCOMES = ("completed", "failed", "cancelled", "expired")

#: Characters with their JSON escapes. JSON allows these characters in a text, but `str.splitlines`
#: ends a line at each, as does OpenAI's SDK (`iter_lines`).
_SEPARATORS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def one_line(text: bytes) -> bytes:
    """Return JSON with the characters of _SEPARATORS escaped."""
    if not text.isascii():
        for letter, escaped in _SEPARATORS:
            text = text.replace(letter, escaped)
    return text


def success_meta(
    delivery: Delivery, body: bytes, timing: dict[str, float | int], prompt: str = "",
    known: str = "",
) -> bytes:  # fmt: skip
    """Return Celery's meta of a success; `body`, the response as JSON, is inserted unchanged.

    `prompt` is the beginning of the prompt, for the list of requests on the page. `known` is the
    digest by which a later request finds the answer. ENQUEUE reads what follows the body.
    """
    rid = orjson.dumps(delivery.request_id)
    ours = _warmq(delivery.batch, delivery.custom_id, delivery.line, None, timing, prompt)
    if known:
        ours["known"] = known
    return b"".join((
        b'{"status":"SUCCESS","result":', body, b',"traceback":null,"children":[],"date_done":',
        orjson.dumps(dt.datetime.now(dt.UTC)), b',"task_id":', rid, b',"warmq":',
        orjson.dumps(ours), b"}",
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
    """Return Celery's meta of a failure; `revoked`: the request was cancelled or has expired.

    `exc_module` of a failure is null. A Celery client without warmq's code then gets an exception
    whose class has the name in `exc_type`.
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
    batch: str, custom_id: str | None, line: int | None, error: object, timing: object,
    prompt: str = "",
) -> dict[str, Any]:  # fmt: skip
    ours = {
        "batch": batch or None, "custom_id": custom_id, "line": line, "error": error,
        "timing": timing,
    }  # fmt: skip
    if prompt:
        ours["prompt"] = prompt
    return ours


@dataclass(slots=True)  # faster to make than a NamedTuple; each result makes one
class ResultLine:
    """One output line of a batch.

    `failed`: the line belongs in the error file. `rejected`: its request is wrong. `outcome` is
    one of OUTCOMES.
    """

    json: bytes
    failed: bool
    rejected: bool = False
    outcome: str = "completed"


#: A line's number, below the highest integer that every JSON reader can read. Lines are counted
#: from 1; a stored 0 is accepted, too.
_Line = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Error(msgspec.Struct):
    code: str
    message: str
    param: str | None = None
    line: _Line | msgspec.UnsetType = msgspec.UNSET


class _Ours(msgspec.Struct):
    """The fields of a result's `warmq` that are read."""

    error: _Error | None = None
    timing: dict[str, float] | None = None
    custom_id: str | None = None
    line: _Line | None = None
    prompt: str | None = None


def read_meta(raw: bytes) -> dict[str, Any]:
    """Decode a stored or published result; another program's value becomes a failure.

    In the returned meta `status` is a text. `warmq` and each of its fields are None or have the
    types that `success_meta` and `failure_meta` write.
    """
    try:
        meta = orjson.loads(raw)
        orjson.dumps(meta)  # raises for a value nested deeper than 254 levels
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        meta = None
    if not (isinstance(meta, dict) and isinstance(meta.get("status"), str)):
        return {"status": "FAILURE", "result": "the stored result cannot be read"}
    if "warmq" in meta:
        meta["warmq"] = _with_valid_fields(meta["warmq"])
    return meta


def _with_valid_fields(ours: object) -> dict[str, Any] | None:
    if not isinstance(ours, dict):
        return None
    if not _is_ours(ours):
        ours.update({n: part if _is_ours({n: part}) else None for n, part in ours.items()})
    return ours


def _is_ours(parts: dict[str, Any]) -> bool:
    try:
        msgspec.convert(parts, _Ours)
    except msgspec.ValidationError:
        return False
    return True


def outcome_of(meta: dict[str, Any]) -> str:
    """Return the outcome of a result that `read_meta` returned."""
    if meta["status"] == "SUCCESS":
        return "completed"
    code = ((meta.get("warmq") or {}).get("error") or {}).get("code")
    return code if code in ("cancelled", "expired") else "failed"


#: Texts in the JSON of an answer that ended at its limit of tokens: of chats and completions, of
#: /v1/responses and of /v1/messages. Quotes within a JSON text are escaped, so no text of an answer
#: can contain one of these.
_CUT = (
    b'"finish_reason":"length"',
    b'"incomplete_details":{"reason":"max_output_tokens"',
    b'"stop_reason":"max_tokens","usage"',
    b'"stop_reason":"max_tokens","stop_sequence":null',
)


def is_cut(answer: bytes) -> bool:
    """Return whether an answer, or a stored success, ended at its limit of tokens."""
    return any(text in answer for text in _CUT)


def is_last_cut(answer: bytes) -> bool:
    """Return whether the last choice is cut; takes 1 µs, a quarter of the time of `is_cut`."""
    at = answer.rfind(b'"finish_reason":"')
    if at < 0:
        return any(text in answer for text in _CUT[1:])
    return answer.startswith(b"length", at + len(b'"finish_reason":"'))


class _Numbered(msgspec.Struct):
    line: int = 0


class _OutputLine(msgspec.Struct):
    error: _Numbered | None = None
    warmq: _Numbered | None = None


_decode_line = msgspec.json.Decoder(_OutputLine).decode


def line_number(output_line: bytes) -> int:
    """Return the number of the input's line of which an output line is the result."""
    found = _decode_line(output_line)
    return (found.error or found.warmq or _Numbered()).line


class _Warmq(msgspec.Struct):
    timing: msgspec.Raw
    custom_id: str | None = None
    line: int | None = None
    reused: bool = False
    answered_by: str = ""


class _Success(msgspec.Struct):
    """The fields of `success_meta` that an output line needs."""

    status: Literal["SUCCESS"]
    result: msgspec.Raw
    warmq: _Warmq


_decode_success = msgspec.json.Decoder(_Success).decode


#: The errors of decoding a result; RecursionError is raised for JSON that is nested too deeply.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def body_of(raw: bytes) -> bytes | None:
    """Return the response as JSON from a stored success; None for any other result."""
    try:
        body = bytes(_decode_success(raw).result)
        body.decode()  # msgspec does not check whether a Raw value is UTF-8
    except _UNREADABLE:
        return None
    return body


def error_of(raw: bytes) -> WarmqError:
    """Return the error in a stored result that is not a success."""
    meta = read_meta(raw)
    result, error = meta.get("result"), _error_in(meta)
    message, code = str(error.get("message")), str(error.get("code"))
    if _is_rejection(result):
        return RequestRejected(message, code=code, field=error.get("param"))
    return RequestFailed(message, code=code)


def _error_in(meta: dict[str, Any]) -> dict[str, Any]:
    ours = meta.get("warmq") or {}
    return ours.get("error") or {"code": "request_failed", "message": str(meta.get("result"))}


def _is_rejection(result: object) -> bool:
    return isinstance(result, dict) and result.get("exc_type") == RequestRejected.__name__


def _plain_line(
    request_id: str,
    raw: bytes,
    custom_id: str | None = None,
    line: int | None = None,
    leader: str = "",
) -> ResultLine | None:
    """Return the output line of a success without decoding its body; None for other results."""
    try:
        meta = _decode_success(raw)
        body, ours, rid = bytes(meta.result), meta.warmq, request_id.encode()
        body.decode()  # msgspec does not check whether a Raw value is UTF-8
    except _UNREADABLE:
        return None
    ran = leader.encode() if leader else rid
    more = b',"same_as":' + orjson.dumps(ours.custom_id) if leader else b""
    if ours.reused:
        more += b',"reused":true,"answered_by":' + orjson.dumps(ours.answered_by)
    if line is None:
        custom_id, line = ours.custom_id, ours.line
    if line is None or custom_id is None or b"\n" in body:
        return None
    out = b"".join((
        b'{"id":"batch_req_', rid, b'","custom_id":', orjson.dumps(custom_id),
        b',"response":{"status_code":200,"request_id":"', ran, b'","body":', body,
        b'},"error":null,"warmq":{"line":%d,"timing":' % line, bytes(ours.timing),
        more, b"}}",
    ))  # fmt: skip
    return ResultLine(one_line(out), False)


def result_line(
    request_id: str, custom_id: str, line: int, raw: bytes | None, leader: str = ""
) -> ResultLine:
    """Return OpenAI's output line for a stored result.

    If `raw` is None, the result has expired, and the line is an error. `leader` is the id of the
    request whose result this is, if the line has the same body as that request; the line then has
    `same_as`.
    """
    plain = _plain_line(request_id, raw, custom_id, line, leader) if raw is not None else None
    return plain or _any_line(request_id, custom_id, line, raw, leader)


def stored_line(request_id: str, raw: bytes) -> ResultLine | None:
    """Return the output line with the result's custom_id and line; None if one is missing."""
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
    rejected, outcome = False, "failed"
    if raw is not None:
        meta = read_meta(raw)
        ours, body = meta.get("warmq") or {}, meta.get("result")
        if leader:
            same_as = {"same_as": ours.get("custom_id")}
        if meta["status"] == "SUCCESS":
            ran = leader or request_id
            out["response"] = {"status_code": 200, "request_id": ran, "body": body}
            reused = {n: ours[n] for n in ("reused", "answered_by") if n in ours}
            out["warmq"] = {"line": line, "timing": ours.get("timing")} | same_as | reused
            return ResultLine(one_line(orjson.dumps(out)), False)
        error, rejected, outcome = _error_in(meta), _is_rejection(body), outcome_of(meta)
    own = {"line": line} if leader else {}  # the leader's error may name the leader's line
    out["error"] = {"line": line, **error, **own, **same_as}
    return ResultLine(one_line(orjson.dumps(out)), True, rejected, outcome)
