"""Tells tenants that their batches have ended: signed POSTs to the endpoints they have named."""
