"""Tells tenants that their batches have ended: signed POSTs to the endpoints they have named."""

from gateway.webhooks.delivering import deliver_due, delivering

__all__ = ["deliver_due", "delivering"]
