"""Middleware that every request passes, and functions that all routes use."""
