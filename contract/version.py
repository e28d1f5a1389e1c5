"""Which warmq this is: the one place that says it."""

from importlib import metadata

#: The form of what Redis holds: batches, messages, leases, lists. Workers announce theirs, batches
#: carry it as `v`, and lua/common.lua has the same number. What another one wrote is refused in
#: words, unless a release says that it serves it. 1: what 0.1.0 wrote, before there was a number.
PROTOCOL = 2


def version() -> str:
    """Return the version that is installed, as `0.1.0`; a mere checkout does not know its own."""
    try:
        return metadata.version("warmq")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
