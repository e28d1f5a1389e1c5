"""The Redis calls of gateways alone: keys, limits, idempotency, webhooks, online requests."""
