"""Reads files of lines, tables, bucket objects and Python iterables; writes files and objects."""
