"""Carries the error of a table's row in the line that the page made of the row.

Such a line is no request, and fails whatever its error is: anyone can write one. That error then
replaces the line's own, as a text of bounded length without control characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from contract.errors import RequestRejected
from contract.failures import LINE_ERRORS
from contract.openai.decode import decode, encode, printable
from producer.input.reader import RawChunk
from producer.submit.lines import in_line

#: The field of a line with the error.
ROW_ERROR = "row_error"
#: Codes that it may have: each line of a batch has its own custom_id already.
_CODES = LINE_ERRORS - {"duplicate_custom_id"}
#: Most characters of its message.
_MESSAGE = 1000


class _Error(msgspec.Struct):
    message: str
    code: str
    field: str | None = None


class _Line(msgspec.Struct):
    row_error: _Error


_decode = msgspec.json.Decoder(_Line).decode


def line_of_error(line: bytes, overrides: dict[str, object], error: RequestRejected) -> bytes:
    """Return a line without its content, and with the row's error instead.

    Its custom_id, url and model stay, because they select its batch and queue.
    """
    value = decode(line)
    body = value.get("body")
    model = {"model": body["model"]} if isinstance(body, dict) and "model" in body else {}
    described = {"message": printable(error.message, _MESSAGE), "code": error.code}
    if error.field:
        described["field"] = error.field
    return encode(value | {"body": model | overrides, ROW_ERROR: described})


def explain(number: int, line: bytes, error: RequestRejected) -> RequestRejected:
    """Return the error of a row, if a bad line has one, else that of the line."""
    of_line = in_line(number, line, error)
    if ROW_ERROR.encode() not in line:
        return of_line
    try:
        found = _decode(line).row_error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return of_line
    if found.code not in _CODES or not found.message:
        return of_line
    return RequestRejected(
        printable(found.message, _MESSAGE),
        code=found.code,
        field=printable(found.field) if found.field else None,
        custom_id=error.custom_id,
    )


def explained(chunks: Iterable[RawChunk]) -> Iterator[RawChunk]:
    """Yield a file's chunks, whose bad lines get the errors of their rows."""
    for chunk in chunks:
        chunk.explain = explain
        yield chunk
