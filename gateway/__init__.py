"""The HTTP face: OpenAI's API over the queue, on producer's library (docs/reference/gateway.md)."""
