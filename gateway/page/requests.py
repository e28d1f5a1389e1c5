"""Reads the requests that ended last, for a batch's page."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from contract.batch import Batch
from contract.index import read_ending
from contract.openai.prompts import prompt_text
from contract.redis.announcements import is_alive
from contract.results import outcome_of, read_meta
from contract.streaming import texts_of
from gateway.http.services import Services
from producer.collect.answers import finish_reason_of, tokens_of

#: Most requests in a sample, most bytes of their results, most rows of the table of requests, and
#: most characters of an answer in it.
SAMPLE, SAMPLE_BYTES, SHOWN, BEGINNING = 300, 4 * 2**20, 50, 160
#: Most characters that are shown of a prompt, and of an answer.
PROMPT_CHARACTERS, TEXT_CHARACTERS = 8000, 20_000
#: Error code -> its remedy. Some codes have other entries for batches made over HTTP and for runs,
#: whose pages have other buttons (failed.py).
REMEDIES = {
    "invalid_json": "Fix the line and submit it again.",
    "invalid_request": "Fix what the message names, and submit it again.",
    "unknown_field": "Remove or rename the field, and submit the line again.",
    "unknown_url": "Use a url that this gateway serves, and submit the line again.",
    "duplicate_custom_id": "Give each line its own custom_id.",
    "line_too_long": "Shorten the line, or raise WARMQ_MAX_LINE_BYTES.",
    "model_not_found": "Use a model from the page Workers, or start a worker that serves it.",
    "adapter_unusable": "Follow the remedy in the message, then retry it.",
    "context_length_exceeded": "Shorten the prompt, or use a model with a longer context.",
    "request_failed": "Retry it; the engine failed on this attempt.",
    "result_too_large": "Ask for fewer tokens.",
    "poison": "See it under Dead letters; the engine died each time it ran.",
    "cancelled": "Retry it if you still want it.",
    "expired": "Retry it: it runs without a deadline then.",
    "expired_over_http": "Retry it: the new batch has the same completion window. For a longer "
    "one, submit the lines again.",
    "cancelled_in_run": "When the run is complete, the same `producer run` with --retry cancelled "
    "runs them.",
    "cancelled_in_complete_run": "The same `producer run` with --retry cancelled runs them.",
    "stopped_in_run": "The same `producer run` runs them when it goes on.",
    "result_expired": "Submit it again; results are kept for WARMQ_RESULT_TTL_S.",
    "internal_error": "Please report it.",
}
#: The remedy for an error code that an engine made.
OTHER_REMEDY = "Retry it; if it fails again, fix the request."


def announcements_of(services: Services) -> dict[str, dict[str, Any]]:
    """Return what each worker announced by its id, dead ones too."""
    return {str(one["id"]): one for one in services.batches.announcements()}


def workers_of(services: Services) -> list[str]:
    """Return the ids of living workers."""
    return [name for name, one in announcements_of(services).items() if is_alive(one)]


def result_fields(result: bytes) -> dict[str, Any]:
    """Return a result's fields for the page; `result` is b'' if there is none."""
    meta = read_meta(result) if result else {}
    ours = meta.get("warmq") or {}
    # A known answer's times are those of the request that was computed, perhaps long ago.
    reused = ours.get("reused") is True
    timing = {} if reused else ours.get("timing") or {}
    body = meta.get("result") if meta.get("status") == "SUCCESS" else None
    return {
        "meta": meta,
        "custom_id": str(ours.get("custom_id") or ""),
        "line": ours.get("line"),
        "error": ours.get("error") or {},
        "attempts": timing.get("attempts"),
        "queued_s": timing.get("queued_s"),
        "engine_s": timing.get("engine_s"),
        "tokens": tokens_of(body)[1] if isinstance(body, dict) else None,
        "finish": finish_reason_of(body) if isinstance(body, dict) else None,
        "prompt": str(ours.get("prompt") or ""),
        "reused": reused,
        "body": body,
    }


def done_at(meta: dict[str, Any]) -> float | None:
    """Return the time at which a request ended, in s since 1970; None if unknown."""
    with suppress(ValueError, OverflowError):
        return dt.datetime.fromisoformat(str(meta.get("date_done"))).timestamp()
    return None


@dataclass(slots=True)
class Sample:
    """A sample of the requests that ended last.

    `again` counts requests that took several attempts. `values` has lists of the requests' numbers
    by name (FIGURES in batches.py), `last` the rows of the table. Only the table has known answers.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    count: int = 0
    again: int = 0
    last: list[dict[str, Any]] = field(default_factory=list)

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


def _latest(services: Services, parts: Sequence[Batch]) -> Iterator[bytes]:
    """Yield the stored results that ended last, newest first."""
    count = size = 0
    for part in parts:
        texts = services.batches.finished_ids(part.id, -SAMPLE, SAMPLE)
        ids = list(dict.fromkeys(read_ending(text)[0] for text in reversed(texts)))
        for at in range(0, len(ids), 50):
            some = ids[at : at + 50]
            for raw in filter(None, services.batches.results(some)):
                count, size = count + 1, size + len(raw)
                yield raw
            if size > SAMPLE_BYTES or count >= SAMPLE:
                return


def sample(services: Services, parts: Sequence[Batch]) -> Sample:
    """Return a sample of the requests that ended last."""
    latest = Sample()
    for raw in _latest(services, parts):
        result = result_fields(raw)
        result["attempts"] = result["attempts"] or 1
        latest.count += not result["reused"]
        latest.again += result["attempts"] > 1
        for name in () if result["reused"] else ("queued_s", "engine_s", "tokens"):
            value = result[name]
            if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
                latest.values.setdefault(name, []).append(float(value))
        if len(latest.last) < SHOWN:
            name = outcome_of(result["meta"])
            answer = text_of(result["body"])[:BEGINNING] or result["error"].get("message") or ""
            latest.last.append(result | {"name": name, "answer": str(answer)[:BEGINNING]})
    return latest


def text_of(body: object) -> str:
    """Return an answer's text, or its JSON if it has none (embeddings, for example)."""
    if not isinstance(body, dict):
        return ""
    text = texts_of(body).get(0) or orjson.dumps(body).decode()
    return text[:TEXT_CHARACTERS]


def prompt_of(message: bytes) -> str:
    """Return the prompt in a message as text; '' if it cannot be read."""
    try:
        body = orjson.loads(orjson.loads(message)["body"])[0][0]
    except (ValueError, TypeError, LookupError):
        return ""
    return prompt_in(body)


def prompt_in(body: object) -> str:
    """Return the prompt of a request's body as text."""
    return prompt_text(body)[:PROMPT_CHARACTERS] if isinstance(body, dict) else ""
