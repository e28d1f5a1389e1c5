"""Anthropic's Message Batches, which run like those of `/v1/batches`."""
