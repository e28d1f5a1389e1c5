"""What OpenAI clients and vLLM agree on: request bodies, batch lines, strict JSON."""
