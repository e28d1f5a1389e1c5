"""Redis as both sides see it: keys, connections, scripts, and the store of batches."""
