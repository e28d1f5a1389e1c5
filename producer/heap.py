"""How this process' heap gives memory back."""

import contextlib
import ctypes
import os
import sys

_MIB = 2**20
#: Parameters of glibc's mallopt(3): free memory above which the heap shrinks, and the size from
#: which a block is mapped by itself, so that what a huge line took is given back.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 64 * _MIB), (-3, _MIB)


def keep_free_memory() -> None:
    """Let this process keep up to 64 MiB that it does not use; without glibc, do nothing.

    Else the kernel maps, clears and takes back the pages of each chunk: a sixth of the CPU of
    submitting a file, side by side (docs/decisions/0009).
    """
    # Arrow's own pool keeps 25 MB more, of tables that are read a few hundred rows at a time.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # musl has no mallopt
            libc = ctypes.CDLL(None)
            for parameter, value in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
                libc.mallopt(parameter, value)
