"""What a compiled RBLN model and its NPUs ask of vLLM."""
