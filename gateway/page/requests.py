"""Pages of a batch's requests: a sample, failures, and one request in full."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import Response

from contract import naming
from contract.batch import Batch
from contract.index import read_ending
from contract.redis.announcements import is_alive
from contract.results import outcome_of, read_meta
from contract.streaming import texts_of
from gateway.batches.api import batches as api
from gateway.batches.api.protocol import part_ids
from gateway.http.errors import not_found
from gateway.http.services import Services
from gateway.page.view import View
from gateway.redis.request_reads import RequestReads, RequestState

#: Most requests in a sample, most bytes of their results, and most requests that are shown in full.
SAMPLE, SAMPLE_BYTES, SHOWN = 300, 4 * 2**20, 20
#: Most failed requests that are shown, and most bytes of an error file that are read for them.
MAX_FAILURES, HEAD_BYTES = 50, 256 * 1024
#: Most characters that are shown of a prompt, and of an answer.
PROMPT_CHARACTERS, TEXT_CHARACTERS = 8000, 20_000
#: Error code -> its remedy.
REMEDIES = {
    "invalid_json": "Fix the line and submit it again.",
    "invalid_request": "Fix the field that the message names, and submit the line again.",
    "unknown_field": "Remove or rename the field, and submit the line again.",
    "unknown_url": "Use a url that this gateway serves, and submit the line again.",
    "duplicate_custom_id": "Give each line its own custom_id.",
    "line_too_long": "Shorten the line, or raise WARMQ_MAX_LINE_BYTES.",
    "model_not_found": "Use a model from the page Workers, or start a worker that serves it.",
    "context_length_exceeded": "Shorten the prompt, or use a model with a longer context.",
    "request_failed": "Retry it; the engine failed on this attempt.",
    "result_too_large": "Ask for fewer tokens.",
    "poison": "See it under Dead letters; the engine died each time it ran.",
    "cancelled": "Retry it if you still want it.",
    "expired": "Retry it with a longer completion window.",
    "result_expired": "Submit it again; results are kept for WARMQ_RESULT_TTL_S.",
    "internal_error": "Please report it.",
}
#: The remedy for an error code that an engine made.
OTHER_REMEDY = "Retry it; if it fails again, fix the request."


def request(view: View) -> Response:
    """Show the request with a custom_id; one that Redis does not know is waiting."""
    batch_id = view.request.path_params["batch_id"]
    custom_id = view.query.get("id", "")[:1000]
    names = part_ids(api.view_of(view.services, view.caller, batch_id))
    parts = [part for part in view.services.batches.states(names) if part is not None]
    if not custom_id or not parts:
        raise not_found("request", custom_id)
    state = _state(view.services, parts, custom_id)
    return view.page("request.html", batch_id=batch_id, custom_id=custom_id, state=state)


def workers_of(services: Services) -> list[str]:
    """Return the ids of living workers."""
    return [str(one["id"]) for one in services.batches.announcements() if is_alive(one)]


def _state(services: Services, parts: list[Batch], custom_id: str) -> dict[str, Any]:
    """Return the fields of a request's page; `returns` counts how often it was handed back."""
    reads, workers = RequestReads.using(services.batches), workers_of(services)
    found = (reads.request(part, custom_id, workers) for part in parts)
    waiting = RequestState(naming.request_id(parts[0].id, custom_id), b"", b"", "", 0, 0, "")
    one = next(filter(None, found), waiting)
    result = result_fields(one.result)
    running = "running" if one.worker else "waiting"
    return result | {
        "request_id": one.request_id,
        "name": outcome_of(result["meta"]) if one.result else running,
        "ended": bool(one.result),
        "worker": one.worker,
        "attempts": result["attempts"] or one.returns + bool(one.worker),
        "returns": one.returns,
        "deaths": one.deaths,
        "done_at": done_at(result["meta"]),
        "failed_attempts": one.attempts,
        "remedy": REMEDIES.get(str(result["error"].get("code")), OTHER_REMEDY),
        "prompt": prompt_of(one.message),
        "text": text_of(result["body"]),
    }


def result_fields(result: bytes) -> dict[str, Any]:
    """Return a result's fields for the page; `result` is b'' if there is none."""
    meta = read_meta(result) if result else {}
    ours = meta.get("warmq") or {}
    timing = ours.get("timing") or {}
    body = meta.get("result") if meta.get("status") == "SUCCESS" else None
    usage = body.get("usage") if isinstance(body, dict) else None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return {
        "meta": meta,
        "custom_id": str(ours.get("custom_id") or ""),
        "line": ours.get("line"),
        "error": ours.get("error") or {},
        "attempts": timing.get("attempts"),
        "queued_s": timing.get("queued_s"),
        "engine_s": timing.get("engine_s"),
        "tokens": tokens if type(tokens) is int else None,
        "body": body,
    }


def done_at(meta: dict[str, Any]) -> float | None:
    """Return when a request ended, in seconds since 1970; None if unknown."""
    with suppress(ValueError, OverflowError):
        return dt.datetime.fromisoformat(str(meta.get("date_done"))).timestamp()
    return None


@dataclass(slots=True)
class Sample:
    """A sample of the requests that ended last.

    `again` counts those that took several attempts. `values` has their numbers by name, `last` some
    of them in full, and `failed` their failures by request id.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    count: int = 0
    again: int = 0
    last: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def quantile(self, name: str, share: float) -> float | None:
        """Return the value that `share` of the values do not exceed."""
        values = sorted(self.values.get(name, ()))
        return values[min(len(values) - 1, int(share * len(values)))] if values else None

    def histogram(self, name: str, bins: int = 12) -> list[tuple[float, float, int]]:
        """Return (from, to, count) of equal bins."""
        values = self.values.get(name, [])
        if not values:
            return []
        low, high = min(values), max(values)
        if high <= low:
            return [(low, high, len(values))]
        width = (high - low) / bins
        counts = Counter(min(bins - 1, int((value - low) / width)) for value in values)
        return [(low + n * width, low + (n + 1) * width, counts[n]) for n in range(bins)]


def _latest(services: Services, parts: Sequence[Batch]) -> Iterator[tuple[str, bytes]]:
    """Yield the results that ended last, as request id and stored text, newest first."""
    count = size = 0
    for part in parts:
        texts = services.batches.finished_ids(part.id, max(0, part.terminal - SAMPLE), SAMPLE)
        ids = list(dict.fromkeys(read_ending(text)[0] for text in reversed(texts)))
        for at in range(0, len(ids), 50):
            page = ids[at : at + 50]
            for request_id, raw in zip(page, services.batches.results(page), strict=True):
                if raw is not None:
                    count, size = count + 1, size + len(raw)
                    yield request_id, raw
            if size > SAMPLE_BYTES or count >= SAMPLE:
                return


def sample(services: Services, parts: Sequence[Batch]) -> Sample:
    """Return a sample of the requests that ended last."""
    found = Sample()
    for request_id, raw in _latest(services, parts):
        result = result_fields(raw)
        result["attempts"] = result["attempts"] or 1
        found.count += 1
        found.again += result["attempts"] > 1
        for name in ("queued_s", "engine_s", "tokens"):
            value = result[name]
            if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
                found.values.setdefault(name, []).append(float(value))
        if result["meta"]["status"] != "SUCCESS":
            name = result["custom_id"] or request_id
            found.failed[request_id] = _failure(name, result["error"], result["line"])
        if len(found.last) < SHOWN:
            found.last.append(result | {"text": text_of(result["body"])})
    return found


def text_of(body: object) -> str:
    """Return an answer's text, or its JSON if it has none (embeddings, for example)."""
    if not isinstance(body, dict):
        return ""
    text = texts_of(body).get(0) or orjson.dumps(body).decode()
    return text[:TEXT_CHARACTERS]


def failures(
    services: Services, parts: Sequence[Batch], ended_last: Sample, error_file: str | None
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return some failed requests by error code, the most frequent code first.

    They are requests that may be retried, failures in the sample, and the first of an error file.
    """
    reads = RequestReads.using(services.batches)
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for one in reads.failed_requests(part.id, MAX_FAILURES):
            result = result_fields(one.result)
            error = result["error"] or {"code": one.outcome}
            name, prompt = result["custom_id"] or one.request_id, prompt_of(one.message)
            found[one.request_id] = _failure(name, error, result["line"], prompt)
    for request_id, failure in ended_last.failed.items():
        found.setdefault(request_id, failure)
    for line in _head(services, error_file) if error_file else ():
        error = line.get("error") or {}
        body = (line.get("response") or {}).get("body") or {}
        name = str(line.get("custom_id") or "")
        request_id = str(line.get("id") or name).removeprefix("batch_req_")
        number = (line.get("warmq") or error).get("line")
        found.setdefault(request_id, _failure(name, error | (body.get("error") or {}), number))
    by_code: dict[str, list[dict[str, Any]]] = {}
    for failure in list(found.values())[:MAX_FAILURES]:
        by_code.setdefault(failure["code"], []).append(failure)
    return sorted(by_code.items(), key=lambda pair: -len(pair[1]))


def _failure(name: str, error: dict[str, Any], line: object, prompt: str = "") -> dict[str, Any]:
    code = str(error.get("code") or "request_failed")
    return {
        "custom_id": name, "line": line, "code": code, "prompt": prompt,
        "message": str(error.get("message") or ""), "remedy": REMEDIES.get(code, OTHER_REMEDY),
    }  # fmt: skip


def _head(services: Services, file_id: str) -> Iterator[dict[str, Any]]:
    """Yield the first lines of a file, decoded; none if the file is deleted."""
    size = services.store.size(file_id) or 0
    text = b"".join(services.store.read(file_id, 0, min(size, HEAD_BYTES))) if size else b""
    for line in text.split(b"\n")[: MAX_FAILURES + 1][:-1]:  # the last one may be cut off
        with suppress(orjson.JSONDecodeError):
            found = orjson.loads(line)
            if isinstance(found, dict):
                yield found


def prompt_of(message: bytes) -> str:
    """Return the prompt in a message as text; '' if it cannot be read."""
    try:
        body = orjson.loads(orjson.loads(message)["body"])[0][0]
    except (ValueError, TypeError, LookupError):
        return ""
    if not isinstance(body, dict):
        return ""
    prompt = body.get("messages") or body.get("prompt") or body.get("input") or body
    if isinstance(prompt, list) and all(isinstance(one, dict) for one in prompt):
        texts = (f"{one.get('role', '')}: {_plain(one.get('content'))}" for one in prompt)
        return "\n".join(texts)[:PROMPT_CHARACTERS]
    return _plain(prompt)[:PROMPT_CHARACTERS]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
