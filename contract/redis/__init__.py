"""Access to Redis for worker, producer and gateway: keys, connections, scripts and batches."""
