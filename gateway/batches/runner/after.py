"""What follows the end of a batch; done again if a process dies between its end and this."""

from __future__ import annotations

from collections.abc import Callable

from gateway.batches.api.record import BatchRecord
from gateway.batches.runner.announcing import announce
from gateway.http.services import Services

#: Called with each batch that has ended, once or more often.
AfterEnd = Callable[[Services, BatchRecord], None]


def give_back(services: Services, record: BatchRecord) -> None:
    """End what the batch holds of its tenant's budget."""
    services.limits.give_back(record.id)


def let_go(services: Services, record: BatchRecord) -> None:
    """End what keeps the content of the batch's file, if the file was deleted."""
    services.objects.forget_reader(record.input_file_id, record.id)


def everything() -> list[AfterEnd]:
    """Return all that follows the end of a batch."""
    return [give_back, let_go, announce]
