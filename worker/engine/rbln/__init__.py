"""The limits that a compiled RBLN model and its NPUs set for vLLM."""
