"""Reads server-sent events, and JSON with errors that some servers make."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import orjson

#: The data of the event that ends a stream.
DONE = b"[DONE]"
#: Data of this many bytes or more is not compared with [DONE].
_SHORT = 32


class Unreadable(ValueError):
    """An event that is not JSON; `data` is its data."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data


class Events:
    """Reads one stream: `feed` its bytes in order, then `close` it. Both yield each event's value.

    An event named `error`, or with a field `error`, has the value {"error": value or text}.
    `done`: [DONE] has come; later bytes are ignored. `half_characters`: a text may be cut
    within a character (see `loads_loosely`).
    """

    def __init__(self) -> None:
        self.done = False
        self.half_characters = False
        self._line: list[bytes] = []
        self._after_cr = False
        #: Data lines of an event whose JSON is not complete.
        self._data: list[bytes] = []
        self._is_error = False
        #: Whether the next empty line ends an event.
        self._open = False

    def feed(self, piece: bytes) -> Iterator[Any]:
        """Read the next bytes. Raises Unreadable if an event is not JSON."""
        for line in self._lines(piece):
            if not line:
                if self._open:
                    yield from self._ended()
            elif line[:5] == b"data:" and not self._open:
                # A line that is complete JSON is an event: some servers omit the empty line.
                data = line[5:]
                if len(data) < _SHORT and data.strip() == DONE:
                    self.done = True
                    return
                try:
                    yield orjson.loads(data)
                except orjson.JSONDecodeError:
                    yield from self._loose(data)
            else:
                self._field(line)

    def _field(self, line: bytes) -> None:
        """Read a line that is not a complete event."""
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._is_error = value.strip() == b"error"
            self._open = self._is_error or bool(self._data)
        elif name == b"error":  # only llama.cpp sends this field
            self._is_error = self._open = True
            self._data.append(value)

    def _lines(self, piece: bytes) -> list[bytes]:
        """Return the lines that end in this piece, by any of the three line ends."""
        if self._after_cr or b"\r" in piece:
            if self._after_cr:  # the piece may begin with the second half of CRLF
                piece = piece.removeprefix(b"\n")
            self._after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = piece.split(b"\n")
        if self._line and len(lines) > 1:
            lines[0] = b"".join((*self._line, lines[0]))
            self._line.clear()
        if rest := lines.pop():
            self._line.append(rest)
        return lines

    def close(self) -> Iterator[Any]:
        """Read the end of the stream. Raises Unreadable if the last event is cut or not JSON."""
        self._after_cr = False
        yield from self.feed(b"\n\n")

    def _loose(self, data: bytes) -> Iterator[Any]:
        if not data.strip():
            return
        try:
            value = loads_loosely(data)
        except ValueError:
            self._data.append(data.removeprefix(b" "))  # the next data line may continue the JSON
            self._open = True
            return
        self.half_characters = True
        yield value

    def _ended(self) -> Iterator[Any]:
        """Yield the value of an event of several lines, or of an error."""
        data, is_error = b"\n".join(self._data), self._is_error
        self._data, self._is_error, self._open = [], False, False
        if not data.strip():
            return
        self.half_characters = True
        try:
            value = loads_loosely(data)
        except ValueError as error:
            if not is_error:
                raise Unreadable(data) from error
            value = data.decode(errors="replace")
        if is_error and not (isinstance(value, dict) and value.get("error")):
            value = {"error": value}
        yield value


# -- JSON with errors that some servers make -------------------------------------------

#: The number that OpenAI sends as the log probability of a very unlikely token.
LOWEST_LOGPROB = -9999.0
#: Matches single surrogates (halves of characters). Those by which Python's surrogateescape marks
#: bytes that are not UTF-8 are not matched.
_HALVES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
#: Matches surrogates at the end of a text, whose other halves may follow.
_OPEN_END = re.compile("[\ud800-\udfff]+$")


def loads_loosely(data: bytes) -> Any:
    """Return the value of JSON that may contain single surrogates, -Infinity and raw newlines.

    Called only if orjson refuses the JSON: the tokens are paid for, so the answer is kept.
    `repaired` joins the surrogates afterwards. Any other error raises ValueError.
    """
    text = data.decode(json.detect_encoding(data), "surrogateescape")
    try:
        return json.loads(
            text, strict=False, parse_int=_int, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _finite(text: str) -> float | None:
    value = float(text)
    if math.isfinite(value):
        return value
    return LOWEST_LOGPROB if value < 0 else None


def _int(text: str) -> float | None:
    return int(text) if len(text) < 19 else _finite(text)


def repaired(value: Any) -> Any:
    """Return the value with surrogates joined to characters, and single ones as U+FFFD."""
    if isinstance(value, str):
        return value if value.isascii() else _repaired(value)
    if isinstance(value, list):
        return [repaired(entry) for entry in value]
    if isinstance(value, dict):
        return {
            repaired(name) if isinstance(name, str) else name: repaired(entry)
            for name, entry in value.items()
        }
    return value


def without_open_end(text: str) -> str:
    """Return an unfinished text without the half of a character at its end."""
    return repaired(_OPEN_END.sub("", text))  # type: ignore[no-any-return]


def _repaired(text: str) -> str:
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _HALVES.sub("\ufffd", text).encode("utf-8", "surrogateescape").decode(errors="replace")
