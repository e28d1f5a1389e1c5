"""Reads the failures of a batch by error code, while it runs and after."""

from contract.batch import Batch as QueueBatch
from contract.redis.failures import FailedCode, FailureReads
from gateway.batches.api.record import ENDED, decode
from gateway.http.services import Services
from gateway.redis.batch_views import BatchView


def failures_of_view(services: Services, view: BatchView) -> list[FailedCode]:
    """Return a batch's failures by code, the most frequent first, each with its first requests.

    Lines of a batch made over HTTP that were never queued are not among them.
    """
    parts = view.parts
    if isinstance(view.source, QueueBatch):
        parts = [view.source]
    else:
        record = decode(view.source.document)
        if record.status in ENDED:
            return record.failures
    return FailureReads.using(services.batches).first(parts)
