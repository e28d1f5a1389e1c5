"""Anthropic's Message Batches, carried as the batches of `/v1/batches` are."""
