"""Looks a batch's file through before anything is queued: what is wrong with it, what it asks for.

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
from typing import Any

import msgspec
import numpy as np
import orjson

from contract.openai.lines import MAX_CUSTOM_ID
from gateway.batches.api.record import Problem
from producer.input.reader import Input, InputUnreadable, chunks
from producer.input.seen import SeenIds

#: Problems that are told; the first ones tell what to do about the others.
MOST_PROBLEMS = 100
#: Models of one batch: each that has a queue of its own is a batch of the queue.
MOST_MODELS = 100


@dataclass(slots=True)
class Looked:
    """What a file has: requests and bytes of them by model ('' where none is named), problems."""

    requests: int = 0
    bytes_of: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)


class _Body(msgspec.Struct):
    model: str = ""


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: _Body
    method: str = "POST"


_decode = msgspec.json.Decoder(_Line).decode


class _BodyAlone(msgspec.Struct):
    body: _Body


_decode_body = msgspec.json.Decoder(_BodyAlone).decode
#: What msgspec raises for a line that is not as nearly all are. It passes over what is nested, and
#: runs out of stack some 1,000 levels deep.
_NOT_PLAIN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def model_of(line: bytes) -> str:
    """Return the model that a line of a file names, '' if it names none that can be read."""
    try:
        return _decode_body(line).body.model
    except _NOT_PLAIN:
        pass
    try:
        model = orjson.loads(line)["body"]["model"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return ""
    return model if isinstance(model, str) else ""


def look_through(
    path: Path, endpoint: str, max_line_bytes: int, most_requests: int,
    report: Callable[[], None] = lambda: None,
) -> Looked:  # fmt: skip
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
) -> Looked:  # fmt: skip
    """Read a file once; `is_new` says of each custom_id whether no line before had it."""
    looked = Looked()
    with closing(Input(str(path), watch=report)) as source:
        try:
            for chunk in chunks(source.lines(), None, max_line_bytes):
                for number, line in chunk.lines:
                    if number in chunk.too_long:
                        size = chunk.too_long[number]
                        looked.problems.append(_too_long(number, size, max_line_bytes))
                    else:
                        _look(looked, is_new, endpoint, number, line)
                looked.requests += len(chunk.lines)
                if most_requests and looked.requests > most_requests:
                    looked.problems = [_too_many(most_requests)]
                    break
                if len(looked.problems) >= MOST_PROBLEMS or len(looked.bytes_of) > MOST_MODELS:
                    break
        except InputUnreadable as error:
            looked.problems.append(Problem("invalid_file", error.message))
    if not looked.requests and not looked.problems:
        told = "the file has no requests; write one JSON object on each line"
        looked.problems.append(Problem("empty_file", told))
    if len(looked.bytes_of) > MOST_MODELS:
        told = f"the file names more than {MOST_MODELS} models; split it into several batches"
        looked.problems.insert(0, Problem("too_many_models", told, "body.model"))
    del looked.problems[MOST_PROBLEMS:]
    return looked


def _too_many(most: int) -> Problem:
    told = f"the file has more than {most} requests; split it into several batches"
    return Problem("too_many_tasks", told)


def _too_long(number: int, size: int, limit: int) -> Problem:
    told = (
        f"the line has {size} bytes, more than {limit} (WARMQ_MAX_LINE_BYTES); shorten it, or split"
        " it"
    )
    return Problem("line_too_long", told, None, number)


def _look(
    looked: Looked, is_new: Callable[[str], bool], endpoint: str, number: int, line: bytes
) -> None:
    try:
        read = _decode(line)
        custom_id, url, method, model = read.custom_id, read.url, read.method, read.body.model
    except _NOT_PLAIN:
        problem, custom_id = _slowly(line, endpoint, number)
        if problem is not None:
            looked.problems.append(problem)
            return
        url, method, model = endpoint, "POST", model_of(line)
    if url != endpoint or method != "POST" or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        found = {"custom_id": custom_id, "url": url, "method": method}
        problem = _problem_of(found, endpoint, number)
        if problem is not None:
            looked.problems.append(problem)
            return
    if not is_new(custom_id):
        told = f"custom_id {custom_id[:100]!r} was used by an earlier line; make it unique"
        looked.problems.append(Problem("duplicate_custom_id", told, "custom_id", number))
        return
    looked.bytes_of[model] += len(line)


def _slowly(line: bytes, endpoint: str, number: int) -> tuple[Problem | None, str]:
    """Say what is wrong with a line that is not as nearly all are; nothing, if it is its body."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        told = f"not valid JSON: {error}; write one JSON object on each line"
        return Problem("invalid_json_line", told, None, number), ""
    if not isinstance(found, dict):
        told = "not a JSON object; write {...} on each line"
        return Problem("invalid_json_line", told, None, number), ""
    return _problem_of(found, endpoint, number), str(found.get("custom_id"))


def _problem_of(found: dict[str, Any], endpoint: str, number: int) -> Problem | None:
    custom_id = found.get("custom_id")
    if custom_id is None:
        told = "custom_id is missing; give each line a text of its own"
        return Problem("missing_required_parameter", told, "custom_id", number)
    if not isinstance(custom_id, str) or not custom_id:
        told = "custom_id is not a text with at least one character; write one in quotes"
        return Problem("invalid_request", told, "custom_id", number)
    if len(custom_id) > MAX_CUSTOM_ID:
        told = (
            f"custom_id {custom_id[:60]!r}… has {len(custom_id)} characters; give at most "
            f"{MAX_CUSTOM_ID}"
        )
        return Problem("invalid_request", told, "custom_id", number)
    method, url = found.get("method", "POST"), found.get("url")
    if method != "POST":
        told = f"method is {_shown(method)}; write POST"
        return Problem("invalid_method", told, "method", number)
    if url is None:
        told = f"url is missing; write the batch's endpoint, {endpoint}"
        return Problem("missing_required_parameter", told, "url", number)
    if url != endpoint:
        told = f"url is {_shown(url)}, the batch's endpoint is {endpoint}; they must be the same"
        return Problem("url_mismatch", told, "url", number)
    return None


def _shown(value: object) -> str:
    return repr(value[:100]) if isinstance(value, str) else "not a text"
