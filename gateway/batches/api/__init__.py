"""Batches over HTTP: what they are, what may be done to them, and how they are carried."""
