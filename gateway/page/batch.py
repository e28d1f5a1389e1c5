"""One batch: how far it is, how its requests were served, which failed and what to do."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import Response

from contract.batch import Batch as QueueBatch
from gateway.batches.api import batches as api
from gateway.batches.api import virtual_files
from gateway.batches.api.protocol import ERRORS, OUTPUT, PARTIAL, parts_of, shown
from gateway.files.content import content
from gateway.files.objects import Files
from gateway.http.errors import ApiError, not_found
from gateway.http.services import Services
from gateway.page.batches import name_inputs, record_of, row_of
from gateway.page.cached import by_rings, rings_of
from gateway.page.requests import workers_of
from gateway.page.samples import Sample, failures, sample
from gateway.page.view import View
from gateway.redis.looking import Looks, RunningRequest

#: Requests that run now, which are shown.
RUNNING = 12


def batch(view: View) -> Response:
    """Show a batch; what is shown of its requests is a sample of those that ended last."""
    batch_id = view.request.path_params["batch_id"]
    found = api.view_of(view.services, view.caller, batch_id)
    row = row_of(found, time.time())
    if row is None:
        raise not_found("batch", batch_id)
    name_inputs(view, [row])
    row.update(by_rings(row, rings_of(view.services, [row])))
    parts = [part for part in view.services.batches.states(parts_of(found)) if part is not None]
    taken = sample(view.services, parts)
    record = record_of(found)
    error_file = record.error_file_id if record else None
    return view.page(
        "batch.html",
        row=row,
        batch=shown(found),
        record=record,
        parts=parts,
        sample=taken,
        failed=_by_code(failures(view.services, parts, taken, error_file)),
        figures=_figures(taken),
        running=[] if row["ended"] else _running(view.services, parts),
        retriable=row["ended"] and row["failed"] > 0 and row["status"] != "failed",
        now_watched="" if row["ended"] else batch_id,
    )


def _by_code(failed: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return failed requests by their codes, the code of most of them first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in failed:
        found.setdefault(one["code"], []).append(one)
    return sorted(found.items(), key=lambda pair: -len(pair[1]))


def _figures(taken: Sample) -> list[tuple[str, list[tuple[float, float, int]]]]:
    return [
        ("Waited in the queue", taken.histogram("queued_s")),
        ("Time in the engine", taken.histogram("engine_s")),
        ("Tokens of the answers", taken.histogram("tokens")),
    ]


def cancel(view: View) -> Response:
    """Begin to cancel a batch."""
    batch_id = view.request.path_params["batch_id"]
    shown_batch, found = api.cancel(view.services, view.caller, batch_id)
    background = None
    if isinstance(found.source, QueueBatch) and shown_batch.status == "cancelling":
        background = BackgroundTask(view.services.batches.cancel, found.source)
    return view.to(f"/ui/batches/{batch_id}", background, told="cancelled")


def _running(services: Services, parts: list[QueueBatch]) -> list[RunningRequest]:
    looks, workers = Looks.beside(services.batches), workers_of(services)
    found = (one for part in parts for one in looks.running(part, workers, RUNNING))
    return [one for one in islice(found, RUNNING) if one.custom_id]


def download(view: View) -> Response:
    """Send a batch's answers, its errors, or what there is so far."""
    batch_id, kind = (view.request.path_params[name] for name in ("batch_id", "kind"))
    found = shown(api.view_of(view.services, view.caller, batch_id), partial=True)
    ids = {"answers": found.output_file_id, "errors": found.error_file_id} if found else {}
    file_id = ids.get(kind)
    if not file_id:
        raise ApiError(404, f"batch {batch_id} has no {kind[:20]} (yet)", code="file_not_found")
    if file_id.startswith((OUTPUT, ERRORS, PARTIAL)):
        return virtual_files.content(view.services, view.caller, file_id, 0)
    record = Files(view.services).get(view.caller.tenant, file_id)
    if record is None or view.services.store.size(file_id) is None:
        raise not_found("file", file_id)
    return content(view.services.store, record, view.request.headers)
