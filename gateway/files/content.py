"""A file's content as an answer: ranges, ETag, always as an attachment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

from starlette.responses import Response, StreamingResponse

from gateway.files.objects import FileRecord
from gateway.http.errors import ApiError, answer
from gateway.store import Store

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


def content(
    store: Store, record: FileRecord, headers: Mapping[str, str], *, head: bool = False
) -> Response:
    """Return the answer to a GET of a file's content, or to a HEAD, which reads nothing.

    One range is served (RFC 9110, section 14); several, and what is no range of bytes, get the
    whole. The ETag is the file's id: no content changes under its id.
    """
    etag = f'"{record.id}"'
    told = {
        "etag": etag,
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
        "x-content-type-options": "nosniff",
        "cache-control": "private, no-cache",
    }
    if etag in headers.get("if-none-match", ""):
        return Response(status_code=304, headers=told)
    size = record.bytes
    wanted = _wanted(headers, etag, size)
    if wanted is None:
        beyond = f"the range begins beyond the file's {size} bytes; ask for one that begins before"
        error = ApiError(416, beyond, code="range_not_satisfiable", param="range")
        return answer(error, {"content-range": f"bytes */{size}", "accept-ranges": "bytes"})
    start, end = wanted
    status = 200
    if (start, end) != (0, size) or _RANGE.fullmatch(_asked(headers, etag)):
        status = 206
        told["content-range"] = f"bytes {start}-{end - 1}/{size}"
    told["content-length"] = str(end - start)
    pieces = () if head else store.read(record.id, start, end)
    return StreamingResponse(pieces, status, told, "application/octet-stream")


def _asked(headers: Mapping[str, str], etag: str) -> str:
    """Return the Range header, '' where it does not apply."""
    return headers.get("range", "") if headers.get("if-range", etag) == etag else ""


def _wanted(headers: Mapping[str, str], etag: str, size: int) -> tuple[int, int] | None:
    """Return the bytes that are asked for, the second exclusive; None for a range beyond."""
    found = _RANGE.fullmatch(_asked(headers, etag))
    if found is None or found[1] == found[2] == "":
        return 0, size
    if not found[1]:  # the last n bytes
        last = min(int(found[2]), size)
        return (size - last, size) if last else None
    start = int(found[1])
    end = min(int(found[2]) + 1, size) if found[2] else size
    return (start, end) if start < end else None
