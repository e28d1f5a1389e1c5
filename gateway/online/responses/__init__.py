"""Serves background responses: queued like batches, and read, cancelled and deleted later."""
