"""Uploads in parts: large files, which a client sends piece by piece and goes on with."""
