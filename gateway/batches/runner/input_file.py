"""Validates a batch's input file before anything is queued.

As with OpenAI, one line that cannot be identified makes the whole file invalid: a line that is not
JSON, is too long, has no custom_id or a repeated one, or names another endpoint. A wrong body fails
only its own request (producer/submit/lines.py).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import orjson

from contract.openai.decode import SHALLOW, may_be_too_deep
from contract.openai.lines import MAX_CUSTOM_ID
from gateway.batches.api.record import BatchError
from producer.input.reader import Input, InputUnreadable, NotJsonLines
from producer.input.seen import SeenIds

#: Most problems of a file that are reported.
MOST_PROBLEMS = 100
#: Most models of one batch. The lines of each queue become a queue batch.
MOST_MODELS = 100


@dataclass(slots=True)
class InputSummary:
    """A file's requests, the bytes of lines by model ('' for none), and problems."""

    requests: int = 0
    bytes_of: Counter[str] = field(default_factory=Counter)
    problems: list[BatchError] = field(default_factory=list)


class Body(msgspec.Struct):
    """The field of a request's body that selects its queue."""

    model: str = ""


class _Line(msgspec.Struct):
    custom_id: str = ""
    url: str = ""
    body: Body = msgspec.field(default_factory=Body)
    method: str = "POST"


class _CustomId(msgspec.Struct):
    custom_id: str


class _Refused(Exception):
    """Raised for a line that makes its file invalid: the problem's code, message, field."""


_decode = msgspec.json.Decoder(_Line).decode
_decode_id = msgspec.json.Decoder(_CustomId).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")
#: Errors of msgspec for a line that does not fit its type; deep nesting raises RecursionError.
_UNUSUAL = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def model_of(line: bytes) -> str:
    """Return the model that a line names, or ''."""
    try:
        return _decode(line).body.model
    except _UNUSUAL:
        pass
    try:
        model = orjson.loads(line)["body"]["model"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return ""
    return model if isinstance(model, str) else ""


def custom_id_of(line: bytes) -> str | None:
    """Return the custom_id of a line, or None."""
    try:
        return _decode_id(line).custom_id
    except _UNUSUAL:
        return None


def with_model(line: bytes, model: str) -> bytes:
    """Return a line with this model in its body, unless the body names one.

    A malformed line is returned unchanged, too; a later check refuses it.
    """
    if model_of(line):
        return line
    try:
        fields = _decode_fields(line)
        body = _decode_fields(fields["body"])
        if body.get("model", _NULL) != _NULL:  # a value that is not text
            return line
        body["model"] = msgspec.Raw(_encode(model))
        fields["body"] = msgspec.Raw(_encode(body))
        return _encode(fields)
    except (*_UNUSUAL, KeyError):
        return line


def validate_input(
    path: Path, endpoint: str, max_line_bytes: int, most_requests: int,
    report: Callable[[], None] = lambda: None,
) -> InputSummary:  # fmt: skip
    """Read and check a file; return its summary.

    This takes 8 bytes of memory for each line. If two custom_ids have the same hash, the file is
    read a second time to compare the custom_ids themselves.

    Args:
        path: The file, plain or compressed with gzip or zstd.
        endpoint: The url that each line must have.
        max_line_bytes: The longest valid line.
        most_requests: The largest valid number of requests; 0 for no limit.
        report: Called for each 256 KiB, compressed or decompressed; may raise to stop the reading.
    """
    hashes = array("q")

    def note_hash(custom_id: str) -> bool:
        hashes.append(hash(custom_id))
        return True

    summary = _read(path, endpoint, max_line_bytes, most_requests, report, note_hash)
    numbers = np.frombuffer(hashes, np.int64) if hashes else np.empty(0, np.int64)
    numbers.sort()
    repeated = bool((numbers[1:] == numbers[:-1]).any())
    del numbers
    if not repeated:
        return summary
    del hashes[:]
    with closing(SeenIds()) as seen:

        def is_new(custom_id: str) -> bool:
            text = custom_id.encode("utf-8", "surrogatepass")
            return seen.put(hashlib.blake2b(text, digest_size=16).digest()) is None

        return _read(path, endpoint, max_line_bytes, most_requests, report, is_new)


def _read(
    path: Path, endpoint: str, max_line_bytes: int, most_requests: int,
    report: Callable[[], None], is_new: Callable[[str], bool],
) -> InputSummary:  # fmt: skip
    """Read a file once; `is_new` returns whether no earlier line had a custom_id."""
    summary = InputSummary()
    problems = summary.problems
    with closing(Input(str(path), watch=report, name="FILE")) as source:
        try:
            for chunk in source.chunks(None, max_line_bytes):
                for number, line in chunk.lines:
                    try:
                        if number in chunk.too_long:
                            raise _Refused("line_too_long", (
                                f"the line has {chunk.too_long[number]} bytes, more than "
                                f"{max_line_bytes} (WARMQ_MAX_LINE_BYTES); shorten it, or split it"
                            ), None)  # fmt: skip
                        summary.bytes_of[_check_line(line, endpoint, is_new)] += len(line)
                    except _Refused as refused:
                        code, message, param = refused.args
                        problems.append(BatchError(code, message, param, number))
                summary.requests += len(chunk.lines)
                if most_requests and summary.requests > most_requests:
                    message = (
                        f"the file has more than {most_requests} requests; split it into several "
                        "batches"
                    )
                    problems[:] = [BatchError("too_many_tasks", message)]
                    break
                if len(problems) >= MOST_PROBLEMS or len(summary.bytes_of) > MOST_MODELS:
                    break
        except InputUnreadable as error:
            problems.append(_problem_of_file(error))
    if not summary.requests and not problems:
        message = "the file has no requests; write one JSON object on each line"
        problems.append(BatchError("empty_file", message))
    if len(summary.bytes_of) > MOST_MODELS:
        message = f"the file names more than {MOST_MODELS} models; split it into several batches"
        problems.insert(0, BatchError("too_many_models", message, "body.model"))
    del problems[MOST_PROBLEMS:]
    return summary


def _problem_of_file(error: InputUnreadable) -> BatchError:
    if isinstance(error, NotJsonLines):
        return BatchError("invalid_json_line", error.message, None, 1)
    return BatchError("invalid_file", error.message)


def _check_line(line: bytes, endpoint: str, is_new: Callable[[str], bool]) -> str:
    """Return the model that a line names; raise _Refused if it makes the file invalid."""
    try:
        if len(line) > SHALLOW and may_be_too_deep(line):
            raise RecursionError
        fields = _decode(line)
        custom_id, model = fields.custom_id, fields.body.model
        is_usual = fields.url == endpoint and fields.method == "POST"
    except _UNUSUAL:
        custom_id, model, is_usual = "", model_of(line), False
    if not is_usual or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        custom_id = _check_fields(line, endpoint)
    if not is_new(custom_id):
        message = f"custom_id {custom_id[:100]!r} was used before; make it unique"
        raise _Refused("duplicate_custom_id", message, "custom_id")
    return model


def _check_fields(line: bytes, endpoint: str) -> str:
    """Return the custom_id of a line that `_decode` does not accept; raise _Refused."""
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        message = f"not valid JSON: {error}; write one JSON object on each line"
        raise _Refused("invalid_json_line", message, None) from None
    if not isinstance(fields, dict):
        raise _Refused("invalid_json_line", "not a JSON object; write {...} on each line", None)
    custom_id = _check_custom_id(fields.get("custom_id"))
    method, url = fields.get("method", "POST"), fields.get("url")
    if method != "POST":
        raise _Refused("invalid_method", f"method is {_quoted(method)}; write POST", "method")
    if url is None:
        message = f"url is missing; write the batch's endpoint, {endpoint}"
        raise _Refused("missing_required_parameter", message, "url")
    if url != endpoint:
        message = f"url is {_quoted(url)}, the batch's endpoint is {endpoint}; they must be equal"
        raise _Refused("url_mismatch", message, "url")
    return custom_id


def _check_custom_id(custom_id: object) -> str:
    if custom_id is None:
        message = "custom_id is missing; give each line a unique text"
        raise _Refused("missing_required_parameter", message, "custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        message = "custom_id is not a text with at least one character; write one in quotes"
        raise _Refused("invalid_request", message, "custom_id")
    if len(custom_id) > MAX_CUSTOM_ID:
        size = len(custom_id)
        message = (
            f"custom_id {custom_id[:60]!r}… has {size} characters; give at most {MAX_CUSTOM_ID}"
        )
        raise _Refused("invalid_request", message, "custom_id")
    return custom_id


def _quoted(value: object) -> str:
    return repr(value[:100]) if isinstance(value, str) else "not a text"
