"""An engine without a model, for tests and benchmarks of the queue."""
