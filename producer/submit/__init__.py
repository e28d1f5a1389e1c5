"""Queues the lines of a source as one batch, in an order of its choice; plans it before."""
