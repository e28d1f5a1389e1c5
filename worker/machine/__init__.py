"""Finds out what this machine has: devices, memory, packages, the model's folder."""
