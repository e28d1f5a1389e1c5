"""Settings of this process's heap."""

import contextlib
import ctypes
import os
import sys

_MIB = 2**20
#: Parameters of glibc's mallopt(3): free memory above which the heap shrinks, and the size from
#: which a block is mapped alone, so that a huge line's memory is returned.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 64 * _MIB), (-3, _MIB)


def keep_free_memory() -> None:
    """Let the heap keep up to 64 MiB of free memory; without glibc, do nothing.

    Otherwise the kernel maps and clears the pages of each chunk again, a sixth of the CPU of
    submitting a file (docs/decisions/0009).
    """
    # Arrow's own pool keeps 25 MB more, of tables that are read a few hundred rows at a time.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # musl has no mallopt
            libc = ctypes.CDLL(None)
            for parameter, value in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
                libc.mallopt(parameter, value)
