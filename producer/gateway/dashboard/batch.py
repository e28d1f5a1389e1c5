"""One batch: how far it is, how its requests were served, which failed and what to do."""

from __future__ import annotations

import time

from starlette.background import BackgroundTask
from starlette.responses import Response

from contract.batch import Batch as QueueBatch
from producer.gateway.batches import batches as api
from producer.gateway.batches.shown import parts_of, shown
from producer.gateway.dashboard.batches import record_of, row_of
from producer.gateway.dashboard.samples import Sample, failures, sample
from producer.gateway.dashboard.view import View
from producer.gateway.errors import not_found


def batch(view: View) -> Response:
    """Show a batch; what is shown of its requests is a sample of those that ended last."""
    batch_id = view.request.path_params["batch_id"]
    found = api.view_of(view.services, view.caller, batch_id)
    row = row_of(found, time.time())
    if row is None:
        raise not_found("batch", batch_id)
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
        failed=failures(view.services, parts, taken, error_file),
        figures=_figures(taken),
        now_watched="" if row["ended"] else batch_id,
    )


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
