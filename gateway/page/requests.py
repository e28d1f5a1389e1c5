"""Requests of a batch: how those that ended last were served, and which failed, bounded however
many there are; one of them, its life with every attempt, its answer as it is written."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Sequence
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

#: Requests in a sample, bytes of their results that are read for it, and those that are shown.
REQUESTS, BYTES, LAST = 300, 4 * 2**20, 20
#: Failed requests that are shown.
FAILURES = 50
#: Bytes of an error file that are read for them, and characters of a prompt that is shown.
HEAD_BYTES, PROMPT_CHARACTERS = 256 * 1024, 8000
#: Characters of an answer that are shown.
TEXT_CHARACTERS = 20_000
#: What to do about a failure, by its code; others are the engine's own, of that request.
REMEDIES = {
    "invalid_json": "Mend the line, and submit it again.",
    "invalid_request": "Mend the field that the message names, and submit the line again.",
    "unknown_field": "Remove or rename the field, and submit the line again.",
    "unknown_url": "Use a url that this gateway serves, and submit the line again.",
    "duplicate_custom_id": "Give each line a custom_id of its own.",
    "line_too_long": "Shorten the line, or raise WARMQ_MAX_LINE_BYTES.",
    "model_not_found": "Name a model of the page Workers, or start a worker that serves it.",
    "context_length_exceeded": "Shorten the prompt, or use a model with a longer context.",
    "request_failed": "Retry it; the engine failed on this try.",
    "result_too_large": "Ask for fewer tokens.",
    "poison": "Look at it under Dead letters: the engine died each time it ran.",
    "cancelled": "Retry it if you want it after all.",
    "expired": "Retry it, with a longer window.",
    "result_expired": "Submit it again; results are kept for WARMQ_RESULT_TTL_S.",
    "internal_error": "Please report it.",
}

OTHER_REMEDY = "Retry it; if it fails again, mend the request."


def request(view: View) -> Response:
    """Show a request by its custom_id; one of which nothing is known yet waits."""
    batch_id = view.request.path_params["batch_id"]
    custom_id = view.query.get("id", "")[:1000]
    found = api.view_of(view.services, view.caller, batch_id)
    names = part_ids(found)
    parts = [part for part in view.services.batches.states(names) if part is not None]
    if not custom_id or not parts:
        raise not_found("request", custom_id)
    state = state_of(view.services, parts, custom_id)
    return view.page("request.html", batch_id=batch_id, custom_id=custom_id, state=state)


def workers_of(services: Services) -> list[str]:
    """Return the workers that live."""
    return [str(one["id"]) for one in services.batches.announcements() if is_alive(one)]


def state_of(services: Services, parts: list[Batch], custom_id: str) -> dict[str, Any]:
    """Return what is known of a request, in the words of its page."""
    looks, workers = RequestReads.using(services.batches), workers_of(services)
    found = (looks.request(part, custom_id, workers) for part in parts)
    waits = RequestState(naming.request_id(parts[0].id, custom_id), b"", b"", "", 0, 0, "")
    one = next(filter(None, found), waits)
    told = _result_fields(one.result)
    running = "running" if one.worker else "waiting"
    return {
        "request_id": one.request_id,
        "name": outcome_of(told["meta"]) if one.result else running,
        "ended": bool(one.result),
        "worker": one.worker,
        "attempts": told["attempts"] or one.returns + bool(one.worker),
        "returns": one.returns,
        "deaths": one.deaths,
        "queued_s": told["queued_s"],
        "engine_s": told["engine_s"],
        "tokens": told["tokens"],
        "done_at": _done_at(told["meta"]),
        "tries": one.attempts,
        "error": told["error"],
        "remedy": REMEDIES.get(str(told["error"].get("code")), OTHER_REMEDY),
        "prompt": prompt_of(one.message),
        "text": text_of(told["body"]),
    }


def _result_fields(result: bytes) -> dict[str, Any]:
    """Return what a stored result tells of its request; '' is one that is not there (yet)."""
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


def _done_at(meta: dict[str, Any]) -> float | None:
    with suppress(ValueError, OverflowError):
        return dt.datetime.fromisoformat(str(meta.get("date_done"))).timestamp()
    return None


@dataclass(slots=True)
class Sample:
    """Values of some requests by name; `again` counts those that needed more than one attempt;
    `failed` are by their request ids."""

    values: dict[str, list[float]] = field(default_factory=dict)
    count: int = 0
    again: int = 0
    last: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, value: object) -> None:
        """Note a value, if it is a number."""
        if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
            self.values.setdefault(name, []).append(float(value))

    def quantile(self, name: str, share: float) -> float | None:
        """Return a value that `share` of the values are not above."""
        values = sorted(self.values.get(name, ()))
        return values[min(len(values) - 1, int(share * len(values)))] if values else None

    def histogram(self, name: str, bins: int = 12) -> list[tuple[float, float, int]]:
        """Return (from, to, count) of as many equal bins."""
        values = self.values.get(name, [])
        if not values:
            return []
        low, high = min(values), max(values)
        if high <= low:
            return [(low, high, len(values))]
        width = (high - low) / bins
        counts = Counter(min(bins - 1, int((value - low) / width)) for value in values)
        return [(low + n * width, low + (n + 1) * width, counts[n]) for n in range(bins)]


def _latest(services: Services, parts: Sequence[Batch]) -> list[tuple[str, bytes]]:
    """Return the results that ended last: request id and stored text, newest first."""
    found: list[tuple[str, bytes]] = []
    size = 0
    for part in parts:
        ended = part.terminal
        start = max(0, ended - REQUESTS)
        texts = services.batches.finished_ids(part.id, start, REQUESTS)
        ids = list(dict.fromkeys(read_ending(text)[0] for text in reversed(texts)))
        for at in range(0, len(ids), 50):
            page = ids[at : at + 50]
            for rid, raw in zip(page, services.batches.results(page), strict=True):
                if raw is not None:
                    found.append((rid, raw))
                    size += len(raw)
            if size > BYTES or len(found) >= REQUESTS:
                return found
    return found


def sample(services: Services, parts: Sequence[Batch]) -> Sample:
    """Return what is known of the requests that ended last."""
    taken = Sample()
    for request_id, raw in _latest(services, parts):
        told = _result_fields(raw)
        taken.count += 1
        told["attempts"] = told["attempts"] or 1
        taken.again += told["attempts"] > 1
        for name in ("queued_s", "engine_s", "tokens"):
            taken.add(name, told[name])
        if told["meta"]["status"] != "SUCCESS":
            failed = _failure(told["custom_id"] or request_id, told["error"], told["line"])
            taken.failed[request_id] = failed
        if len(taken.last) < LAST:
            taken.last.append(told | {"text": text_of(told["body"])})
    return taken


def text_of(body: object) -> str:
    """Return the text of an answer; of one that has none, as an embedding, what it says instead."""
    if not isinstance(body, dict):
        return ""
    if text := texts_of(body).get(0):
        return text[:TEXT_CHARACTERS]
    return orjson.dumps(body).decode()[:TEXT_CHARACTERS]


def failures(
    services: Services, parts: Sequence[Batch], taken: Sample, output: str | None
) -> list[dict[str, Any]]:
    """Return some failed requests, with what to do: those that may run again, and of the sample
    those that may not; of a batch that has ended the first of its error file."""
    reads = RequestReads.using(services.batches)
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for one in reads.failed_requests(part.id, FAILURES):
            told = _result_fields(one.result)
            error = told["error"] or {"code": one.outcome}
            name, prompt = told["custom_id"] or one.request_id, prompt_of(one.message)
            found[one.request_id] = _failure(name, error, told["line"], prompt)
    found |= {key: one for key, one in taken.failed.items() if key not in found}
    for line in _head(services, output) if output else ():
        told = line.get("error") or {}
        body = (line.get("response") or {}).get("body") or {}
        name = str(line.get("custom_id") or "")
        key = str(line.get("id") or name).removeprefix("batch_req_")
        number = (line.get("warmq") or told).get("line")
        found.setdefault(key, _failure(name, told | (body.get("error") or {}), number))
    return list(found.values())[:FAILURES]


def _failure(
    custom_id: str, error: dict[str, Any], line: object, prompt: str = ""
) -> dict[str, Any]:
    code = str(error.get("code") or "request_failed")
    return {
        "custom_id": custom_id, "line": line, "code": code, "prompt": prompt,
        "message": str(error.get("message") or ""), "remedy": REMEDIES.get(code, OTHER_REMEDY),
    }  # fmt: skip


def _head(services: Services, file_id: str) -> list[dict[str, Any]]:
    """Return the first lines of a file, decoded; none if it is gone."""
    size = services.store.size(file_id)
    if not size:
        return []
    text = b"".join(services.store.read(file_id, 0, min(size, HEAD_BYTES)))
    lines = text.split(b"\n")[: FAILURES + 1]
    found = []
    for line in lines[:-1]:  # the last one may be cut, or is empty
        with suppress(orjson.JSONDecodeError):
            found.append(orjson.loads(line))
    return [line for line in found if isinstance(line, dict)]


def prompt_of(message: bytes) -> str:
    """Return what a message asks, readable; '' if it cannot be read."""
    try:
        body = orjson.loads(orjson.loads(message)["body"])[0][0]
    except (ValueError, TypeError, LookupError):
        return ""
    if not isinstance(body, dict):
        return ""
    told = body.get("messages") or body.get("prompt") or body.get("input") or body
    if isinstance(told, list) and all(isinstance(one, dict) for one in told):
        texts = (f"{one.get('role', '')}: {_plain(one.get('content'))}" for one in told)
        return "\n".join(texts)[:PROMPT_CHARACTERS]
    return _plain(told)[:PROMPT_CHARACTERS]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
