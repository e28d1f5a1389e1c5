"""One request of a batch: its life with every attempt, its answer as it is written."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from contract import naming
from contract.batch import Batch
from contract.redis.announcements import is_alive
from contract.results import outcome_of, read_meta
from gateway.batches.api import batches as api
from gateway.batches.api.protocol import parts_of
from gateway.http.errors import not_found
from gateway.http.services import Services
from gateway.page.samples import ANOTHER, REMEDIES, prompt_of, text_of
from gateway.page.view import View
from gateway.redis.looking import Looks, OneRequest


def request(view: View) -> Response:
    """Show a request by its custom_id; one of which nothing is known yet waits."""
    batch_id = view.request.path_params["batch_id"]
    custom_id = view.query.get("id", "")[:1000]
    found = api.view_of(view.services, view.caller, batch_id)
    names = parts_of(found)
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
    looks, workers = Looks.beside(services.batches), workers_of(services)
    for part in parts:
        one = looks.request(part, custom_id, workers)
        if one is not None:
            return _known(one)
    waits = OneRequest(naming.request_id(parts[0].id, custom_id), b"", b"", "", 0, 0, "")
    return _known(waits)


def _known(one: OneRequest) -> dict[str, Any]:
    meta = read_meta(one.result) if one.result else {}
    ours = meta.get("warmq") or {}
    timing, error = ours.get("timing") or {}, ours.get("error") or {}
    body = meta.get("result") if meta.get("status") == "SUCCESS" else None
    usage = (body.get("usage") or {}) if isinstance(body, dict) else {}
    running = "running" if one.worker else "waiting"
    done_at = None
    with suppress(ValueError):
        done_at = dt.datetime.fromisoformat(str(meta.get("date_done"))).timestamp()
    return {
        "request_id": one.request_id,
        "name": outcome_of(meta) if meta else running,
        "ended": bool(meta),
        "worker": one.worker,
        "attempts": timing.get("attempts") or one.returns + bool(one.worker),
        "returns": one.returns,
        "deaths": one.deaths,
        "queued_s": timing.get("queued_s"),
        "engine_s": timing.get("engine_s"),
        "tokens": usage.get("completion_tokens"),
        "done_at": done_at,
        "tries": one.attempts,
        "error": error,
        "remedy": REMEDIES.get(str(error.get("code")), ANOTHER),
        "prompt": prompt_of(one.message),
        "text": text_of(body),
    }
