"""Collects a batch's results into files and tables."""
