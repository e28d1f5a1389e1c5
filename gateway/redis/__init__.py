"""What only gateways keep in Redis: keys, limits, tries, sessions, webhooks, online requests."""
