"""Tells tenants that their batches have ended: signed POSTs to the endpoints they have named."""

from producer.gateway.webhooks.announcing import announce
from producer.gateway.webhooks.delivering import deliver_due, delivering

__all__ = ["announce", "deliver_due", "delivering"]
