"""Runs a file of any size through the queue, in windows, into one growing output."""
