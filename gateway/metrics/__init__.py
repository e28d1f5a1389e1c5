"""Serves /metrics: Prometheus series of workers, queues and batches, read from Redis."""
