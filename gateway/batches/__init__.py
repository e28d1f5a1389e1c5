"""Batches: OpenAI's API, Anthropic's, and the process that runs them."""
