"""Sets how much free memory this process's heap keeps."""

import contextlib
import ctypes
import os
import sys

_MIB = 2**20
#: Parameters of glibc's mallopt(3) with their values. M_TRIM_THRESHOLD: bytes of free memory above
#: which the heap shrinks. M_MMAP_THRESHOLD: size from which a block is mapped outside the heap, so
#: that the kernel gets the memory of a huge line back.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 64 * _MIB), (-3, _MIB)


def keep_free_memory() -> None:
    """Let the heap keep up to 64 MiB of free memory; without glibc, do nothing.

    Otherwise the kernel maps and clears memory for each chunk again, which takes a sixth of the CPU
    time of submitting a file (docs/decisions/0009).
    """
    # Arrow's own memory pool would keep 25 MB more, although tables are read in small pieces.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # musl has no mallopt
            libc = ctypes.CDLL(None)
            for parameter, value in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
                libc.mallopt(parameter, value)
