"""Reads parquet, Arrow and CSV tables; their rows become lines of an input file."""
