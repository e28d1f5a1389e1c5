"""Servers that speak the OpenAI API, as an engine."""
