"""The checks of `producer doctor`."""
