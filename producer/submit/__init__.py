"""Queues the lines of a source as one batch; can estimate and order them first."""
