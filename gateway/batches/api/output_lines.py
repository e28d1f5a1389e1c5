"""Lines of output and error files as OpenAI writes them, of the lines that producer/collect reads.

A success already has that form (contract/results.py); its body is not decoded, but for one of
`/v1/responses`, of which vLLM leaves fields out. A failure gets OpenAI's form: a request that had
an answer has it in `response`, with a status of 4xx or 5xx and the error in `response.body.error`;
only one that never had an answer has a top-level `error`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import orjson

from contract.results import ResultLine, one_line
from gateway.batches.api.record import Usage
from gateway.http.errors import ApiError
from gateway.online.events.responses import MALFORMED_ANSWER, complete_response

#: Bytes that are sent at once, and lines that are read for them, one or two ms of CPU.
CHUNK_BYTES, CHUNK_LINES = 128 * 1024, 500
#: What an answer of /v1/responses has; within texts quotes are escaped.
_RESPONSE = b'"object":"response"'
#: Endings without an answer, by warmq's code: OpenAI's code for them.
WITHOUT_ANSWER = {
    "expired": "batch_expired", "cancelled": "batch_cancelled", "result_expired": "result_expired"
}  # fmt: skip
_EXPIRED = "This request could not be executed before the completion window expired."
_CANCELLED = "This request was not executed because its batch was cancelled."
_MESSAGES = {"expired": _EXPIRED, "cancelled": _CANCELLED}


def openai_line(line: ResultLine) -> bytes:
    """Return a line of an output file, or if it `failed` of an error file, without a newline."""
    if not line.failed:
        return _with_all_fields(line.json) if _RESPONSE in line.json else line.json
    told = orjson.loads(line.json)
    error = told["error"]
    code = error.get("code") or "request_failed"
    out: dict[str, Any] = {"id": told["id"], "custom_id": told["custom_id"]}
    if code in WITHOUT_ANSWER:
        message = _MESSAGES.get(code, error.get("message"))
        out |= {"response": None, "error": {"code": WITHOUT_ANSWER[code], "message": message}}
    else:
        out |= {"response": _refusal(told["id"], code, error, line.rejected), "error": None}
    ours = {name: error[name] for name in ("line", "same_as") if name in error}
    return one_line(orjson.dumps(out | {"warmq": ours}))


def _refusal(line_id: str, code: str, error: dict[str, Any], rejected: bool) -> dict[str, Any]:
    """Return the answer that an online request would have had."""
    told = ApiError(
        (404 if code == "model_not_found" else 400) if rejected else 500,
        error.get("message") or code,
        code=code,
        param=error.get("param"),
        type="invalid_request_error" if rejected else "server_error",
    )
    request_id = line_id.removeprefix("batch_req_")
    return {"status_code": told.status, "request_id": request_id, "body": told.body}


def _with_all_fields(line: bytes) -> bytes:
    try:
        found = orjson.loads(line)
        body = found["response"]["body"]
        if body.get("object") != "response":
            return line
        found["response"]["body"] = complete_response(body)
        return one_line(orjson.dumps(found))
    except MALFORMED_ANSWER:
        return line


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Reasoning(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """vLLM's usage; the names of `/v1/responses` and `/v1/messages` beside those of chats."""

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


class _Line(msgspec.Struct):
    response: _Response


_decode = msgspec.json.Decoder(_Line).decode


def usage_of(line: bytes) -> Usage:
    """Return the tokens of a success, zeros where its answer names none.

    The answer's other fields are passed over, not decoded (0.5 to 1 us for a short chat).
    """
    try:
        found = _decode(line).response.body.usage
    except (msgspec.DecodeError, RecursionError):
        found = None
    if found is None:
        return Usage()
    cached = found.prompt_tokens_details or found.input_tokens_details
    reasoning = found.completion_tokens_details or found.output_tokens_details
    return Usage(
        input=found.prompt_tokens or found.input_tokens or 0,
        output=found.completion_tokens or found.output_tokens or 0,
        cached=(cached and cached.cached_tokens) or found.cache_read_input_tokens or 0,
        reasoning=(reasoning and reasoning.reasoning_tokens) or 0,
    )


def in_chunks(lines: Iterable[bytes | None]) -> Iterator[bytes]:
    """Yield lines in chunks to be sent; empty ones after many lines of the other file (None)."""
    gathered: list[bytes] = []
    size = 0
    for number, line in enumerate(lines, 1):
        if line is not None:
            gathered += (line, b"\n")
            size += len(line) + 1
        if size >= CHUNK_BYTES or number % CHUNK_LINES == 0:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)
