"""Streamed answers: the events of each API, made of the text while it is written."""
