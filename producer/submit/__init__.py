"""Submitting and collecting as a library; nothing here knows a terminal."""
