"""Implements the `producer` command."""
