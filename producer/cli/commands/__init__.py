"""Has a module for each command; main.py imports the one that runs."""
