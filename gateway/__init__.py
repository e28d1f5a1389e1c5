"""The HTTP face: OpenAI's API over the queue, on producer/core (docs/gateway.md)."""
