"""Has the checks of `producer doctor`."""
