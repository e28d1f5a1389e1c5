"""The `producer` command."""
