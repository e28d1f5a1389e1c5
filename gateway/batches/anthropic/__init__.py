"""Anthropic's Message Batches API; its batches run like those of `/v1/batches`."""
