"""Redis calls that only gateways make: keys, limits, idempotency, webhooks, online requests."""
