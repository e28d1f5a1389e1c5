"""Collects a batch's results, and writes them where they go."""
