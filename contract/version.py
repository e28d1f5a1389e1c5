"""Which warmq this is: the one place that says it."""

from importlib import metadata


def version() -> str:
    """Return the version that is installed, as `0.1.0`; a mere checkout does not know its own."""
    try:
        return metadata.version("warmq")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
