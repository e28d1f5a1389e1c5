"""What follows the end of a batch; done again if a process dies between its end and this."""

from __future__ import annotations

from gateway.batches.api.record import ENDED, BatchRecord
from gateway.http.services import Services
from gateway.redis.webhooks import Delivery, Webhooks, delivery_id


def after_end(services: Services, record: BatchRecord) -> None:
    """End what the batch holds of its tenant's budget, and what keeps the content of its file if
    that was deleted; and have its end told."""
    services.limits.give_back(record.id)
    services.objects.forget_reader(record.input_file_id, record.id)
    note_webhooks(services, record)


def note_webhooks(services: Services, record: BatchRecord) -> None:
    """Note the deliveries of a batch's end, one for each endpoint that wants to hear of it.

    Whoever carries a batch calls it after its end is written and before its work is done: then
    a crash between the two only makes it called again, which delivers nothing twice.

    Raises:
        StoreUnavailable: call it again; nothing is noted twice.
    """
    if record.status not in ENDED:
        return
    event, webhooks = f"batch.{record.status}", Webhooks.using(services.batches)
    for endpoint in webhooks.all():
        if endpoint.tenant != record.tenant or event not in endpoint.events:
            continue
        delivery = Delivery(
            id=delivery_id(record.id, endpoint.id, event),
            endpoint_id=endpoint.id,
            batch_id=record.id,
            event=event,
            created_at=record.changed_at.get(record.status, record.created_at),
        )
        webhooks.note(delivery)
        # Also if it was known: who noted it may have died before it came so far.
        services.due.add("webhook", delivery.id)
