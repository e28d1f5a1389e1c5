"""vLLM's own serving classes, in process."""
