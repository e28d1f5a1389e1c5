"""Reads the lines of a batch's file before they are requests: which model each names, and what is
wrong with the file, which is looked through before anything is queued.

As at OpenAI, a line that cannot be told apart from others refuses the whole file: one that is no
JSON, is too long, has no custom_id or another line's, or names another endpoint. What is wrong with
a body concerns its line alone (producer/submit/lines.py).
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

from contract.openai.lines import MAX_CUSTOM_ID
from gateway.batches.api.record import BatchError
from producer.input.reader import Input, InputUnreadable
from producer.input.seen import SeenIds

#: Problems that are told; the first ones tell what to do about the others.
MOST_PROBLEMS = 100
#: Models of one batch: each that has a queue of its own is a batch of the queue.
MOST_MODELS = 100


@dataclass(slots=True)
class InputSummary:
    """What a file has: requests and bytes of them by model ('' where none is named), problems."""

    requests: int = 0
    bytes_of: Counter[str] = field(default_factory=Counter)
    problems: list[BatchError] = field(default_factory=list)


class Body(msgspec.Struct):
    """Of a request's body what says where it is queued."""

    model: str = ""


class _Line(msgspec.Struct):
    """A line as nearly all are."""

    custom_id: str = ""
    url: str = ""
    body: Body = msgspec.field(default_factory=Body)
    method: str = "POST"


class _IdAlone(msgspec.Struct):
    custom_id: str


class _Refused(Exception):
    """A line refuses its file: code, text and field of the problem."""


_decode = msgspec.json.Decoder(_Line).decode
_decode_id = msgspec.json.Decoder(_IdAlone).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")
#: What msgspec raises for a line that is not as nearly all are. It passes over what is nested, and
#: runs out of stack some 1,000 levels deep.
_NOT_PLAIN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def model_of(line: bytes) -> str:
    """Return the model that a line of a file names, '' if it names none that can be read."""
    try:
        return _decode(line).body.model
    except _NOT_PLAIN:
        pass
    try:
        model = orjson.loads(line)["body"]["model"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return ""
    return model if isinstance(model, str) else ""


def custom_id_of(line: bytes) -> str | None:
    """Return the custom_id of a line of a file, None if it has none that can be read."""
    try:
        return _decode_id(line).custom_id
    except _NOT_PLAIN:
        return None


def with_model(line: bytes, model: str) -> bytes:
    """Return a line with the name of a model in its body, in place of none; all else is as it was.

    A line that is no request is returned as it is: it gets its error where it is checked.
    """
    if model_of(line):
        return line
    try:
        fields = _decode_fields(line)
        body = _decode_fields(fields["body"])
        if body.get("model", _NULL) != _NULL:  # no name: refused where it is checked
            return line
        body["model"] = msgspec.Raw(_encode(model))
        fields["body"] = msgspec.Raw(_encode(body))
        return _encode(fields)
    except (*_NOT_PLAIN, KeyError):
        return line


def validate_input(
    path: Path, endpoint: str, max_line_bytes: int, most_requests: int,
    report: Callable[[], None] = lambda: None,
) -> InputSummary:  # fmt: skip
    """Read a file to its end, with 8 bytes of memory a line; only where two custom_ids may be the
    same, it is read again to tell which. `report` is called after each 256 KiB at most, packed or
    unpacked.

    Args:
        path: the file, or one compressed by gzip or zstd.
        endpoint: what the url of each line must be.
        max_line_bytes: a longer line refuses the file, for nobody knows its custom_id.
        most_requests: more refuse the file; 0 for no limit.
        report: may raise to stop it.
    """
    hashes = array("q")

    def first(custom_id: str) -> bool:
        hashes.append(hash(custom_id))
        return True

    looked = _looked(path, endpoint, max_line_bytes, most_requests, report, first)
    if not _repeats(hashes):
        return looked
    del hashes[:]
    with closing(SeenIds()) as seen:

        def is_new(custom_id: str) -> bool:
            text = custom_id.encode("utf-8", "surrogatepass")
            return seen.put(hashlib.blake2b(text, digest_size=16).digest()) is None

        return _looked(path, endpoint, max_line_bytes, most_requests, report, is_new)


def _repeats(numbers: array[int]) -> bool:
    found = np.frombuffer(numbers, np.int64) if numbers else np.empty(0, np.int64)
    found.sort()
    return bool((found[1:] == found[:-1]).any())


def _looked(
    path: Path, endpoint: str, max_line_bytes: int, most_requests: int,
    report: Callable[[], None], is_new: Callable[[str], bool],
) -> InputSummary:  # fmt: skip
    """Read a file once; `is_new` says of each custom_id whether no line before had it."""
    looked = InputSummary()
    problems = looked.problems
    with closing(Input(str(path), watch=report)) as source:
        try:
            for chunk in source.chunks(None, max_line_bytes):
                for number, line in chunk.lines:
                    try:
                        if number in chunk.too_long:
                            raise _too_long(chunk.too_long[number], max_line_bytes)
                        looked.bytes_of[_look(line, endpoint, is_new)] += len(line)
                    except _Refused as refused:
                        code, told, param = refused.args
                        problems.append(BatchError(code, told, param, number))
                looked.requests += len(chunk.lines)
                if most_requests and looked.requests > most_requests:
                    told = f"the file has more than {most_requests} requests; split it into several"
                    told += " batches"
                    problems[:] = [BatchError("too_many_tasks", told)]
                    break
                if len(problems) >= MOST_PROBLEMS or len(looked.bytes_of) > MOST_MODELS:
                    break
        except InputUnreadable as error:
            problems.append(BatchError("invalid_file", error.message))
    if not looked.requests and not problems:
        told = "the file has no requests; write one JSON object on each line"
        problems.append(BatchError("empty_file", told))
    if len(looked.bytes_of) > MOST_MODELS:
        told = f"the file names more than {MOST_MODELS} models; split it into several batches"
        problems.insert(0, BatchError("too_many_models", told, "body.model"))
    del problems[MOST_PROBLEMS:]
    return looked


def _too_long(size: int, limit: int) -> _Refused:
    told = (
        f"the line has {size} bytes, more than {limit} (WARMQ_MAX_LINE_BYTES); shorten it, or split"
        " it"
    )
    return _Refused("line_too_long", told, None)


def _look(line: bytes, endpoint: str, is_new: Callable[[str], bool]) -> str:
    """Return the model that a line names; raise _Refused if it refuses the file."""
    try:
        read = _decode(line)
        custom_id, model = read.custom_id, read.body.model
        good = read.url == endpoint and read.method == "POST"
    except _NOT_PLAIN:
        custom_id, model, good = "", model_of(line), False
    if not good or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        custom_id = _checked(line, endpoint)
    if not is_new(custom_id):
        told = f"custom_id {custom_id[:100]!r} was used by an earlier line; make it unique"
        raise _Refused("duplicate_custom_id", told, "custom_id")
    return model


def _checked(line: bytes, endpoint: str) -> str:
    """Return the custom_id of a line that is not as nearly all are, if that is its body alone."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        told = f"not valid JSON: {error}; write one JSON object on each line"
        raise _Refused("invalid_json_line", told, None) from None
    if not isinstance(found, dict):
        told = "not a JSON object; write {...} on each line"
        raise _Refused("invalid_json_line", told, None)
    custom_id = _usable(found.get("custom_id"))
    method, url = found.get("method", "POST"), found.get("url")
    if method != "POST":
        raise _Refused("invalid_method", f"method is {_shown(method)}; write POST", "method")
    if url is None:
        told = f"url is missing; write the batch's endpoint, {endpoint}"
        raise _Refused("missing_required_parameter", told, "url")
    if url != endpoint:
        told = f"url is {_shown(url)}, the batch's endpoint is {endpoint}; they must be the same"
        raise _Refused("url_mismatch", told, "url")
    return custom_id


def _usable(custom_id: object) -> str:
    if custom_id is None:
        told = "custom_id is missing; give each line a text of its own"
        raise _Refused("missing_required_parameter", told, "custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        told = "custom_id is not a text with at least one character; write one in quotes"
        raise _Refused("invalid_request", told, "custom_id")
    if len(custom_id) > MAX_CUSTOM_ID:
        told = (
            f"custom_id {custom_id[:60]!r}… has {len(custom_id)} characters; give at most "
            f"{MAX_CUSTOM_ID}"
        )
        raise _Refused("invalid_request", told, "custom_id")
    return custom_id


def _shown(value: object) -> str:
    return repr(value[:100]) if isinstance(value, str) else "not a text"
