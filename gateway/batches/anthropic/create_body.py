"""Reads the body of POST /v1/messages/batches as it arrives, and writes the input file.

Each request becomes one line. Memory holds one request, and 16 bytes for each custom_id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator
from typing import Any

import orjson

from contract.errors import RequestRejected
from contract.openai.decode import MAX_VALUES, decode, int_if_whole
from gateway.batches.anthropic.protocol import ENDPOINT
from gateway.file_store import Writer
from gateway.http.errors import ApiError, invalid

#: Deepest nesting of a value, and largest number of fields of the body. orjson reads 1,024 levels;
#: Anthropic documents one field.
MAX_LEVELS, MAX_FIELDS = 1000, 100

_BLANK = re.compile(rb"[ \t\n\r]*+")
_SCALAR = re.compile(rb"[^ \t\n\r,{}\[\]]*+")
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
#: Matches everything before the next bracket, complete strings included. It is an atomic group,
#: because a possessive `)*+` also takes an incomplete string with Python 3.11.2 (Debian 12).
_PLAIN = re.compile(rb'(?>(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*)', re.DOTALL)
_OBJECT, _OBJECT_END, _ARRAY, _ARRAY_END, _QUOTE, _COMMA, _COLON = b'{}[]",:'

#: A generator of the parser; it yields when it needs more bytes.
_Step = Generator[None, None, None]


class ArrayElements:
    """Parses a JSON object that arrives in pieces, and collects one array's elements.

    `found` gets each complete element of the array `name`. Calls raise ApiError (400) for malformed
    JSON, too deep nesting, too many values or too many fields.
    """

    def __init__(self, name: str) -> None:
        self.found: list[bytes] = []
        self._name = name
        self._text = bytearray()
        # Text before `_start` has been consumed, text before `_at` has been scanned.
        self._start = self._at = 0
        self._complete = False
        self._steps = self._read_object()

    def feed(self, data: bytes) -> None:
        del self._text[: self._start]
        self._at -= self._start
        self._start = 0
        self._text += data
        next(self._steps)

    def end(self) -> None:
        """Raise ApiError unless the object is complete."""
        if not self._complete:
            raise _not_json("it ends too early")

    def _read_object(self) -> _Step:
        if (yield from self._next_byte()) != _OBJECT:
            message = f"the body is not a JSON object; give one with a list {self._name}"
            raise invalid(message, self._name, "invalid_json")
        self._consume()
        more = (yield from self._next_byte()) != _OBJECT_END
        fields = 0
        while more:
            fields += 1
            if fields > MAX_FIELDS:
                raise invalid(
                    f"the body has more than {MAX_FIELDS} fields; send only the field `requests`"
                )
            yield from self._read_field()
            more = yield from self._consume_comma(_OBJECT_END)
        self._consume()
        self._complete = True
        yield from self._next_byte()
        raise _not_json("more text follows its end")

    def _read_field(self) -> _Step:
        if (yield from self._next_byte()) != _QUOTE:
            raise _not_json("give a field's name in quotes")
        name = decoded((yield from self._read_value()), "a field's name")
        if (yield from self._next_byte()) != _COLON:
            raise _not_json("a colon is missing after a field's name")
        self._consume()
        if name == self._name and (yield from self._next_byte()) == _ARRAY:
            yield from self._read_array()
        else:
            decoded((yield from self._read_value()), "a field")

    def _read_array(self) -> _Step:
        self._consume()
        more = (yield from self._next_byte()) != _ARRAY_END
        while more:
            self.found.append((yield from self._read_value()))
            more = yield from self._consume_comma(_ARRAY_END)
        self._consume()

    def _consume_comma(self, end: int) -> Generator[None, None, bool]:
        """Consume a comma and return True, or return False before `end`."""
        byte = yield from self._next_byte()
        if byte == _COMMA:
            self._consume()
        elif byte != end:
            raise _not_json("a comma or a bracket is missing after a value")
        return byte == _COMMA

    def _next_byte(self) -> Generator[None, None, int]:
        """Return the next byte that is not blank, and stay before it."""
        while True:
            self._at = self._start = _end(_BLANK, self._text, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            yield

    def _consume(self) -> None:
        self._at += 1
        self._start = self._at

    def _read_value(self) -> Generator[None, None, bytes]:
        first = yield from self._next_byte()
        if first in (_OBJECT, _ARRAY):
            yield from self._read_nested()
        elif first == _QUOTE:
            self._at += 1
            yield from self._read_string()
        else:
            yield from self._read_scalar()
        value = bytes(memoryview(self._text)[self._start : self._at])
        self._start = self._at
        return value

    def _read_scalar(self) -> _Step:
        while True:
            self._at = _end(_SCALAR, self._text, self._at)
            if self._at < len(self._text):
                return
            yield

    def _read_string(self) -> _Step:
        while True:
            self._at = _end(_IN_STRING, self._text, self._at)
            if self._at < len(self._text) and self._text[self._at] == _QUOTE:
                self._at += 1
                return
            yield  # the rest is at most one backslash, whose next byte has not arrived

    def _read_nested(self) -> _Step:
        levels = opened = 0
        while True:
            self._at = _end(_PLAIN, self._text, self._at)
            if self._at == len(self._text):
                yield
                continue
            byte = self._text[self._at]
            self._at += 1
            if byte == _QUOTE:  # an incomplete string
                yield from self._read_string()
            elif byte in (_OBJECT, _ARRAY):
                levels += 1
                opened += 1
                if levels > MAX_LEVELS:
                    message = f"the body nests more than {MAX_LEVELS} levels; make it flatter"
                    raise invalid(message, code="invalid_json")
                if opened > MAX_VALUES:
                    raise invalid(f"one request or field has more than {MAX_VALUES} JSON values")
            else:
                levels -= 1
                if not levels:
                    return


def decoded(text: bytes, what: str) -> Any:
    """Return a decoded value; raise ApiError (400) for malformed JSON or too many values."""
    try:
        return decode(text)
    except RequestRejected as error:
        message = error.message
        if error.code == "invalid_json":  # drop its remedy, which is about lines of files
            message = message.partition(";")[0]
        raise ApiError(400, f"{what}: {message}", code=error.code) from None


def _not_json(problem: str) -> ApiError:
    return invalid(f"the body is not JSON: {problem}", code="invalid_json")


def _end(pattern: re.Pattern[bytes], text: bytearray, at: int) -> int:
    """Return the end of a match, which may be empty."""
    match = pattern.match(text, at)
    return match.end() if match else at


#: Largest body in bytes, and most requests in it: Anthropic's own limits.
MOST_BYTES, MOST_REQUESTS = 256_000_000, 100_000
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: Bytes that are written to the store at a time.
_PIECE = 2**20


class RequestLines:
    """Writes a body's requests as lines of a file. Calls raise ApiError (400, 413)."""

    def __init__(self, writer: Writer, longest_line: int) -> None:
        self.count = 0
        self.written = 0
        self._writer = writer
        self._longest = longest_line
        self._size = self._bytes_since_request = 0
        self._sha256 = hashlib.sha256()
        self._custom_ids: set[bytes] = set()
        self._lines = bytearray()
        self._elements = ArrayElements("requests")

    @property
    def digest(self) -> str:
        """The SHA-256 of the body so far, in hex."""
        return self._sha256.hexdigest()

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MOST_BYTES:
            raise _too_large(f"the body has more than {MOST_BYTES} bytes; send several batches")
        self._sha256.update(data)
        # Counts the bytes since the last complete request: an incomplete one is held in memory.
        self._bytes_since_request += len(data)
        self._elements.feed(data)
        if self._elements.found:
            self._take()
            self._bytes_since_request = 0
        elif self._bytes_since_request > 2 * self._longest:
            raise _too_large(
                f"requests.{self.count}: more than {self._longest} bytes (WARMQ_MAX_LINE_BYTES)"
            )

    def end(self) -> None:
        """Write the last lines; raise ApiError unless the body is complete."""
        self._elements.end()
        if not self.count:
            raise invalid(f"requests: give a list of 1 to {MOST_REQUESTS} requests", "requests")
        self._flush()

    def _flush(self) -> None:
        self._writer.write(bytes(self._lines))
        self.written += len(self._lines)
        self._lines.clear()

    def _take(self) -> None:
        for text in self._elements.found:
            self._lines += self._line(decoded(text, f"requests.{self.count}"))
            self.count += 1
            if self.count > MOST_REQUESTS:
                raise _too_large(f"requests: more than {MOST_REQUESTS}; send several batches")
        self._elements.found.clear()
        if len(self._lines) >= _PIECE:
            self._flush()

    def _line(self, request: Any) -> bytes:
        at = f"requests.{self.count}"
        if not isinstance(request, dict):
            raise invalid(f"{at}: give an object with custom_id and params", at)
        custom_id, params = request.get("custom_id"), request.get("params")
        if not isinstance(custom_id, str) or not _CUSTOM_ID.fullmatch(custom_id):
            raise invalid(
                f"{at}.custom_id: give 1 to 64 letters, digits, _ or -", f"{at}.custom_id"
            )
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._custom_ids:
            message = f"{at}.custom_id: {custom_id} was used before; each must be unique"
            raise invalid(message, f"{at}.custom_id")
        self._custom_ids.add(digest)
        _check_params(params, f"{at}.params")
        line = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": params}
        try:
            written = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:
            raise invalid(f"{at}.params: nested too deeply, or not Unicode", at) from None
        if len(written) > self._longest:
            raise _too_large(f"{at}: more than {self._longest} bytes (WARMQ_MAX_LINE_BYTES)")
        return written


def check_length(length: int) -> None:
    """Raise ApiError (413) if a body's Content-Length is too large."""
    if length > MOST_BYTES:
        message = f"the body has {length} bytes, more than {MOST_BYTES}; send several batches"
        raise _too_large(message, close=True)


def _check_params(params: Any, at: str) -> None:
    """Raise ApiError (400) if a required field is wrong or `stream` is true; remove `stream`.

    The batch runner checks everything else when it queues the request.
    """
    if not isinstance(params, dict):
        raise invalid(f"{at}: give the body of a POST to {ENDPOINT}, an object", at)
    if not isinstance(params.get("model"), str) or not params["model"]:
        raise invalid(f"{at}.model: name a model", f"{at}.model")
    tokens = int_if_whole(params.get("max_tokens"))
    if type(tokens) is not int or tokens < 1:
        raise invalid(f"{at}.max_tokens: give a whole number from 1", f"{at}.max_tokens")
    if not isinstance(params.get("messages"), list) or not params["messages"]:
        raise invalid(f"{at}.messages: give at least one message", f"{at}.messages")
    if params.pop("stream", False) not in (False, None):
        raise invalid(f"{at}.stream: answers of a batch are not streamed", f"{at}.stream")


def _too_large(message: str, *, close: bool = False) -> ApiError:
    return ApiError(413, message, code="request_too_large", close=close)
