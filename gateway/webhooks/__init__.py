"""Webhooks: signed POSTs to tenants' endpoints when their batches end."""
