"""Gives the installed version, and the number of its protocol: the format of data in Redis."""

from importlib import metadata

#: The number of the format of batches, messages, leases and lists in Redis; also in lua/common.lua.
#: Workers announce it, and batches have it as `v`. Data of a protocol that a release does not know
#: are refused. Protocol 1 is that of 0.1.0, which wrote no number.
PROTOCOL = 2


def version() -> str:
    """Return the installed version, for example `0.1.0`; a checkout without a build has none."""
    try:
        return metadata.version("warmq")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
