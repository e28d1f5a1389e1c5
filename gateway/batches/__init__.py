"""Batches: OpenAI's API, Anthropic's, and the process that carries them through the queue."""
