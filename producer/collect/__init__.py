"""Reads a batch's results, and writes them into files and tables."""
