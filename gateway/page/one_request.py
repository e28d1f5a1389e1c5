"""Page of one request: its state, prompt and answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from contract import naming
from contract.batch import Batch
from contract.failures import is_wrong
from contract.index import IndexEntry, entry_request_id, leader_of
from contract.redis.objects import Stored
from contract.results import outcome_of
from contract.runs import no_request_text
from gateway.batches.api import batches as api
from gateway.batches.api.protocol import part_ids
from gateway.batches.api.record import decode
from gateway.batches.runner.row_errors import ROW_ERROR
from gateway.files.files import Files
from gateway.http.errors import ApiError, not_found
from gateway.page import file_reading
from gateway.page.batches import row_of
from gateway.page.file_reading import ReadGuard, TooLong, lines_of_file, uploaded_name
from gateway.page.requests import (
    OTHER_REMEDY,
    REMEDIES,
    done_at,
    prompt_in,
    prompt_of,
    result_fields,
    text_of,
)
from gateway.page.summary import stalls_of
from gateway.page.view import View
from gateway.redis.batch_views import BatchView
from producer.request_reads import MOST_WORKERS, RequestReads, RequestState, state_at
from producer.stalls import with_silence

#: Most seconds for which an index or an input file is searched for one request.
_SEARCH_S = 10.0


class _NeedsSearch(Exception):
    """An index or a file must be searched, which is done for one caller of a tenant at a time."""


async def one_at_a_time(handler: Callable[..., Response], view: View) -> Response:
    """Call the handler; one per tenant at a time if it must search an index or a file."""
    try:
        return await run_in_threadpool(handler, view, guard=None)
    except _NeedsSearch:
        return await file_reading.one_at_a_time(handler, view)


def request(view: View, *, guard: ReadGuard | None) -> Response:
    """Show the request with a custom_id; raise _NeedsSearch if that needs a guard."""
    batch_id, custom_id = view.request.path_params["batch_id"], view.query.get("id", "")[:1000]
    batch_view = api.view_of(view.services, view.caller, batch_id)
    parts = [
        part for part in view.services.batches.states(part_ids(batch_view)) if part is not None
    ]
    if guard is not None:
        guard.start(_SEARCH_S)
    reads = RequestReads.using(view.services.batches)
    holders = reads.holders()
    workers = list(islice(holders, MOST_WORKERS))
    number = view.query.get("line", "")[:12]
    own_id = partial(_request_id, custom_id=custom_id, line=number)
    states = (reads.request(part, own_id(part), workers) for part in parts)
    one, line = next(filter(None, states), None), None
    if one is None:
        if guard is None:
            raise _NeedsSearch
        found = _in_index(view, parts, custom_id, guard)
        if found is None:
            raise _unknown(batch_view.source, custom_id)
        part, entry = found
        line, request_id = entry[0], leader_of(entry) or entry_request_id(part.id, entry)
        waiting = RequestState(request_id, b"", b"", "", 0, 0, "")
        one = reads.request(part, request_id, workers) or waiting
    worker = holders.get(one.worker)
    state = _fields(one, state_at(worker))
    waits = state["name"] in ("waiting", "silent")
    row = row_of(batch_view, time.time()) if waits else None
    stalls = with_silence(
        stalls_of(view, [row] if row else []), worker if waits else None, view.services.settings
    )
    state["line"] = line or state["line"]
    prompt = prompt_of(one.message)
    if not prompt and not isinstance(batch_view.source, Batch):
        if guard is None:
            raise _NeedsSearch
        prompt = _in_file(view, batch_view.source, state["line"], guard)
    return view.page(
        "request.html", batch_id=batch_id, custom_id=custom_id, state=state,
        stalls=stalls,
        prompt=prompt or state["prompt"], whole=bool(prompt),
        refused=is_wrong(state["error"].get("code")), file=_name_of(view, batch_view),
    )  # fmt: skip


def _request_id(part: Batch, *, custom_id: str, line: str) -> str:
    """Return a request's id; a line without a custom_id of its own is named by its number."""
    if line.isdecimal():
        return naming.line_request_id(part.id, int(line))
    return naming.request_id(part.id, custom_id)


def _in_index(
    view: View, parts: Sequence[Batch], custom_id: str, guard: ReadGuard
) -> tuple[Batch, IndexEntry] | None:
    """Return the line with a custom_id, and its queue batch; None if none has it.

    The search is needed for a request that waits, which has no key, and for one without a
    custom_id, whose id comes from its line's number.
    """
    with suppress(TooLong):
        for part in parts:
            for chunk in view.services.batches.index(part.id):
                guard()
                for entry in chunk.entries:
                    if entry[1] == custom_id:
                        return part, entry
    return None


def _unknown(source: Stored | Batch, custom_id: str) -> ApiError:
    """Return the error for a custom_id that is not in Redis."""
    error = not_found("request", custom_id)
    if isinstance(source, Batch) and source.is_run:
        error.message = no_request_text(source, custom_id[:200])
    return error


def _in_file(view: View, source: Stored, line: object, guard: ReadGuard) -> str:
    """Return the prompt in a line of the input file; '' if the file or the line is not there."""
    file = Files(view.services).get(view.caller.tenant, decode(source.document).input_file_id)
    if file is None or not isinstance(line, int) or view.services.store.size(file.id) is None:
        return ""
    with suppress(TooLong, orjson.JSONDecodeError, TypeError, LookupError):
        for number, text in lines_of_file(view.services, file.id, guard):
            if number < line:
                continue
            value = orjson.loads(text)
            is_request = number == line and ROW_ERROR not in value
            return prompt_in(value["body"]) if is_request else ""
    return ""


def _name_of(view: View, batch_view: BatchView) -> str:
    """Return the name of a batch's input file."""
    if isinstance(batch_view.source, Batch):
        return batch_view.source.fields.get("input", "")
    file_id = decode(batch_view.source.document).input_file_id
    file = Files(view.services).get(view.caller.tenant, file_id)
    return uploaded_name(file.filename) if file else file_id


def _fields(one: RequestState, name: str) -> dict[str, Any]:
    """Return the fields of a request's page; `name` is its state before its end.

    `returns` counts how often it was handed back.
    """
    result = result_fields(one.result)
    return result | {
        "request_id": one.request_id,
        "name": outcome_of(result["meta"]) if one.result else name,
        "ended": bool(one.result),
        "worker": one.worker,
        "attempts": result["attempts"] or one.deliveries,
        "returns": one.returns,
        "deaths": one.deaths,
        "done_at": done_at(result["meta"]),
        "failed_attempts": one.attempts,
        "remedy": REMEDIES.get(str(result["error"].get("code")), OTHER_REMEDY),
        "text": text_of(result["body"]),
    }
