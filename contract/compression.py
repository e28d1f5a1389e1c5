"""Decompresses bodies that a Celery client has compressed (option `compression`)."""

import base64
import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any

from contract.errors import RequestRejected
from contract.openai.decode import printable

#: Most bytes of memory for liblzma; its strongest preset takes 65 MiB.
_LZMA_BYTES = 96 * 2**20
#: The decompressors by kombu's name in the header `compression`; kombu's gzip is zlib's format.
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "application/x-gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 32),
    "application/x-bz2": bz2.BZ2Decompressor,
    "application/x-lzma": lambda: lzma.LZMADecompressor(memlimit=_LZMA_BYTES),
}


def inflated(body: str, compression: object, max_bytes: int) -> bytes:
    """Return the decompressed text of `body`, which is compressed data in base64.

    Raises:
        RequestRejected: the text has more than `max_bytes`, the data are damaged, or the name
            `compression` is unknown.
    """
    make = _DECOMPRESSORS.get(compression) if isinstance(compression, str) else None
    if make is None:
        raise RequestRejected(
            f"Celery option compression: {printable(str(compression))!r} is not supported; "
            "use gzip, bzip2 or lzma",
            code="unsupported_option",
        )
    inflating = make()
    try:
        packed = base64.b64decode(body, validate=True)
        text: bytes = inflating.decompress(packed, max_bytes + 1)
    except (zlib.error, OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise RequestRejected(f"Celery option compression: {error}") from None
    if len(text) > max_bytes:
        raise RequestRejected(
            f"Celery option compression: the body has more than {max_bytes} bytes "
            "(WARMQ_MAX_LINE_BYTES)"
        )
    if not inflating.eof:
        raise RequestRejected("Celery option compression: the compressed body is cut short")
    return text
