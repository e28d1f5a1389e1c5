"""Reads multipart forms as they arrive: a file of any size takes constant memory."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from gateway.file_store import Writer
from gateway.http.errors import ApiError, invalid

#: Bytes that a thread writes to the store at a time.
PIECE = 2**20
#: Most bytes of a form without its file's content: its fields, headers and boundaries.
FORM_BYTES = 64 * 1024
_MOST_PARTS = 100
#: Bytes that are parsed before other tasks of the event loop may run.
_STEP = 64 * 1024


@dataclass(slots=True)
class ReceivedForm:
    """A form's fields, and its file's name, size and SHA-256 (hex)."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    size: int = 0
    digest: str = ""


class _Form:
    """A form that is being parsed. The parser's callbacks do not block."""

    def __init__(self, boundary: bytes, file_field: str) -> None:
        self.received = ReceivedForm()
        self.file = bytearray()
        self.complete = False
        self._file_field = file_field
        self._name, self._value, self._parts = "", bytearray(), 0
        self._header, self._header_value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._in_file = False
        #: Bytes of the body so far, and the bytes of the file's content among them.
        self._read = self._of_file = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin, "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_header_field": self._on_header, "on_header_value": self._on_value,
                "on_header_end": self._on_header_end, "on_headers_finished": self._on_headers_end,
                "on_end": self._on_form_end,
            },
        )  # fmt: skip

    def write(self, data: bytes) -> None:
        """Parse a piece; raise ApiError if more than FORM_BYTES are not the file's."""
        self._parser.write(data)
        self._read += len(data)
        # The parser may keep back the last bytes of a piece if they could begin a boundary.
        if self._read - self._of_file > FORM_BYTES:
            raise invalid(
                f"the form has more than {FORM_BYTES} bytes that are not the file's content; send "
                "short fields, and nothing before or after the parts"
            )

    def end(self) -> None:
        self._parser.finalize()

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise invalid(
                f"the form has more than {_MOST_PARTS} parts; send the file and its few fields"
            )
        self._headers, self._value, self._in_file = {}, bytearray(), False

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._header_value)
        self._header, self._header_value = bytearray(), bytearray()

    def _on_headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._in_file = self._name == self._file_field
        if self._in_file:
            if self.received.filename is not None:
                raise invalid(f"{self._file_field} comes twice; send one file", self._file_field)
            self.received.filename = options.get(b"filename", b"upload").decode(errors="replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.file += data[start:end]
            self._of_file += end - start
        else:
            self._value += data[start:end]

    def _on_part_end(self) -> None:
        if not self._in_file:
            self.received.fields[self._name] = self._value.decode(errors="replace")

    def _on_form_end(self) -> None:
        self.complete = True


def check_length(content_length: str, most: int, what: str, field: str) -> None:
    """Raise ApiError (413) if a form's Content-Length shows a file of more than `most` bytes."""
    if content_length.isdecimal() and int(content_length) > most + FORM_BYTES:
        raise ApiError(
            413, f"the request's body has {content_length} bytes; {what} may have at most {most}",
            code="file_too_large", param=field, close=True,
        )  # fmt: skip


async def receive(request: Request, writer: Writer, file_field: str, most: int) -> ReceivedForm:
    """Read a form, writing its file as it arrives; raise ApiError (400, 413), FileStoreFailed."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        raise _malformed("send a form: Content-Type: multipart/form-data with a boundary")
    form, sha256 = _Form(boundary, file_field), hashlib.sha256()
    try:
        async for chunk in request.stream():
            for start in range(0, len(chunk), _STEP):
                form.write(chunk[start : start + _STEP])
                if len(form.file) >= PIECE:
                    await _flush(form, writer, sha256, file_field, most)
                elif start:
                    await asyncio.sleep(0)
        form.end()
    except FormParserError as error:
        raise _malformed(f"the form cannot be read: {error}") from None
    await _flush(form, writer, sha256, file_field, most)
    if not form.complete:
        raise _malformed("the form ends too early")
    if form.received.filename is None:
        raise invalid(
            f"{file_field} is missing: send the content as the form's part {file_field!r}",
            file_field, "missing_required_parameter",
        )  # fmt: skip
    form.received.digest = sha256.hexdigest()
    return form.received


def _malformed(message: str) -> ApiError:
    return invalid(message, code="invalid_multipart")


async def _flush(
    form: _Form, writer: Writer, sha256: hashlib._Hash, file_field: str, most: int
) -> None:
    data, form.file = bytes(form.file), bytearray()
    form.received.size += len(data)
    if form.received.size > most:
        raise ApiError(
            413, f"{file_field} has more than {most} bytes, the most that this gateway takes",
            code="file_too_large", param=file_field,
        )  # fmt: skip

    def write() -> None:
        sha256.update(data)
        writer.write(data)

    if data:
        await asyncio.to_thread(write)
