"""Converts an uploaded table, or lines in the short form, to the lines of OpenAI's Batch API.

A process of its own reads the file, with limits of memory and time: a hostile file ends only that
process.
"""
