"""Checks what OpenAI's clients send: request bodies, batch lines, JSON of bounded size."""
