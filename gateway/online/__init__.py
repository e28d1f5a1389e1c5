"""Serves online requests, whose callers wait for the answer on an open connection."""
