"""This installation's version, and the protocol that it uses in Redis."""

from importlib import metadata

#: The form of batches, messages, leases and lists in Redis, as in lua/common.lua. Workers announce
#: theirs, batches have it as `v`; another's is refused unless a release serves it. 1: 0.1.0, which
#: wrote no number.
PROTOCOL = 2


def version() -> str:
    """Return the installed version, as `0.1.0`; a mere checkout has none."""
    try:
        return metadata.version("warmq")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
