"""The gateway: OpenAI's and Anthropic's APIs over the queue (docs/reference/gateway.md)."""
