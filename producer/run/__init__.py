"""Runs a file of any size in windows (parts, each a batch), into one growing output."""
