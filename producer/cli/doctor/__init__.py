"""Looks at everything that warmq needs, and tells what is in the way: `examine.py`."""
