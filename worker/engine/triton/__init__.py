"""Triton's vLLM backend, as an engine."""
