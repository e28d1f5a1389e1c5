"""Converts result lines into the lines of OpenAI's output and error files.

The line of a success has their format already (contract/results.py); only answers of
`/v1/responses` get the fields that vLLM leaves out. A refused or failed request gets a `response`
with status 4xx or 5xx and the error in its body. A request without an answer gets a top-level
`error`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import orjson

from contract.results import ResultLine, one_line
from gateway.batches.api.record import Usage
from gateway.http.errors import ApiError
from gateway.online.events import MALFORMED_ANSWER, complete_response

#: Bytes of a chunk, and the most lines that are read for one, which take 1 or 2 ms of CPU.
CHUNK_BYTES, CHUNK_LINES = 128 * 1024, 500
#: Text in each answer of /v1/responses. No string in an answer matches: its quotes are escaped.
_RESPONSE = b'"object":"response"'
#: warmq's error code for a request without an answer -> OpenAI's code.
WITHOUT_ANSWER = {
    "expired": "batch_expired", "cancelled": "batch_cancelled", "result_expired": "result_expired"
}  # fmt: skip
_EXPIRED = "This request could not be executed before the completion window expired."
_CANCELLED = "This request was not executed because its batch was cancelled."
_MESSAGES = {"expired": _EXPIRED, "cancelled": _CANCELLED}


def openai_line(line: ResultLine) -> bytes:
    """Return a line of the output file (of the error file if `failed`), without newline."""
    if not line.failed:
        return _with_missing_fields(line.json) if _RESPONSE in line.json else line.json
    stored = orjson.loads(line.json)
    error = stored["error"]
    code = error.get("code") or "request_failed"
    out: dict[str, Any] = {"id": stored["id"], "custom_id": stored["custom_id"]}
    if code in WITHOUT_ANSWER:
        message = _MESSAGES.get(code, error.get("message"))
        out |= {"response": None, "error": {"code": WITHOUT_ANSWER[code], "message": message}}
    else:
        out |= {
            "response": _error_response(stored["id"], code, error, line.rejected),
            "error": None,
        }
    ours = {name: error[name] for name in ("line", "same_as") if name in error}
    return one_line(orjson.dumps(out | {"warmq": ours}))


def _error_response(
    line_id: str, code: str, error: dict[str, Any], rejected: bool
) -> dict[str, Any]:
    """Return the response that an online request with this error would have got."""
    answer = ApiError(
        (404 if code == "model_not_found" else 400) if rejected else 500,
        error.get("message") or code,
        code=code,
        param=error.get("param"),
        type="invalid_request_error" if rejected else "server_error",
    )
    request_id = line_id.removeprefix("batch_req_")
    return {"status_code": answer.status, "request_id": request_id, "body": answer.body}


def _with_missing_fields(line: bytes) -> bytes:
    try:
        success = orjson.loads(line)
        body = success["response"]["body"]
        if body.get("object") != "response":
            return line
        success["response"]["body"] = complete_response(body)
        return one_line(orjson.dumps(success))
    except MALFORMED_ANSWER:
        return line


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Reasoning(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """vLLM's `usage`, with the field names of chats, `/v1/responses` and `/v1/messages`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    input_tokens_details: _Cached | None = None
    cache_read_input_tokens: int | None = None
    completion_tokens_details: _Reasoning | None = None
    output_tokens_details: _Reasoning | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Ours(msgspec.Struct):
    same_as: str | None = None
    reused: bool = False


class _Line(msgspec.Struct):
    response: _Response
    warmq: _Ours | None = None


_decode = msgspec.json.Decoder(_Line).decode


def usage_of(line: bytes) -> Usage:
    """Return the token counts of a success; none if another request's answer is in it.

    Only its `usage` is decoded: 0.5 to 1 us for a short chat.
    """
    try:
        found = _decode(line)
    except (msgspec.DecodeError, RecursionError):
        return Usage()
    usage, ours = found.response.body.usage, found.warmq
    if usage is None or (ours is not None and (ours.reused or ours.same_as is not None)):
        return Usage()
    cached = usage.prompt_tokens_details or usage.input_tokens_details
    reasoning = usage.completion_tokens_details or usage.output_tokens_details
    return Usage(
        input=usage.prompt_tokens or usage.input_tokens or 0,
        output=usage.completion_tokens or usage.output_tokens or 0,
        cached=(cached and cached.cached_tokens) or usage.cache_read_input_tokens or 0,
        reasoning=(reasoning and reasoning.reasoning_tokens) or 0,
    )


def in_chunks(lines: Iterable[bytes | None]) -> Iterator[bytes]:
    """Yield lines in chunks of about CHUNK_BYTES, without those that are None.

    A chunk ends after CHUNK_LINES lines at the latest, and may be empty.
    """
    chunk: list[bytes] = []
    size = 0
    for number, line in enumerate(lines, 1):
        if line is not None:
            chunk += (line, b"\n")
            size += len(line) + 1
        if size >= CHUNK_BYTES or number % CHUNK_LINES == 0:
            yield b"".join(chunk)
            chunk, size = [], 0
    if chunk:
        yield b"".join(chunk)
