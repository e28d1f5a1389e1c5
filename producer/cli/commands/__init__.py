"""The commands, a file each; main.py imports the one that runs."""
