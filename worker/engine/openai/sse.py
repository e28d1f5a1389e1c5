"""Server-sent events and JSON as servers write them: bytes in, values out."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import orjson

DONE = b"[DONE]"
#: Longer data is not that.
_SHORT = 32


class Unreadable(ValueError):
    """An event that is not JSON; `data` is what it says."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data


class Events:
    """One stream: `feed` it bytes in order, then `close` it; both yield an event's value.

    An event whose name is `error`, or that has a field of that name, comes as {"error": value or
    text}. `done`: [DONE] came, and nothing after it counts; `odd`: a text may have halves of
    characters (see `loads_loosely`).
    """

    def __init__(self) -> None:
        self.done = False
        self.odd = False
        self._line: list[bytes] = []
        self._after_cr = False
        #: Lines of an event that is no JSON yet.
        self._data: list[bytes] = []
        self._is_error = False
        #: An event has begun that ends with the next empty line.
        self._open = False

    def feed(self, piece: bytes) -> Iterator[Any]:
        """Take in the next bytes.

        Raises:
            Unreadable: an event is no JSON.
        """
        for line in self._lines(piece):
            if not line:
                if self._open:
                    yield from self._ended()
            elif line[:5] == b"data:" and not self._open:
                # A line that is JSON by itself is an event: some servers leave out the empty one.
                data = line[5:]
                if len(data) < _SHORT and data.strip() == DONE:
                    self.done = True
                    return
                try:
                    yield orjson.loads(data)
                except orjson.JSONDecodeError:
                    yield from self._loose(data)
            else:
                self._note(line)

    def _note(self, line: bytes) -> None:
        """Take in a line that is no event by itself."""
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._is_error = value.strip() == b"error"
            self._open = self._is_error or bool(self._data)
        elif name == b"error":  # a field of llama.cpp's own
            self._is_error = self._open = True
            self._data.append(value)

    def _lines(self, piece: bytes) -> list[bytes]:
        """Return the lines that end in this piece, whichever of the three line ends they have."""
        if self._after_cr or b"\r" in piece:
            if self._after_cr:  # a line ended with the piece before, or ends with this newline
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
        """Take in the end, which may be a last line's, too.

        Raises:
            Unreadable: the last event is no JSON, or half of it.
        """
        self._after_cr = False
        yield from self.feed(b"\n\n")

    def _loose(self, data: bytes) -> Iterator[Any]:
        if not data.strip():
            return
        try:
            value = loads_loosely(data)
        except ValueError:
            self._data.append(data.removeprefix(b" "))  # it may go on in the next line
            self._open = True
            return
        self.odd = True
        yield value

    def _ended(self) -> Iterator[Any]:
        """Read an event whose lines are no JSON each by itself."""
        data, is_error = b"\n".join(self._data), self._is_error
        self._data, self._is_error, self._open = [], False, False
        if not data.strip():
            return
        self.odd = True
        try:
            value = loads_loosely(data)
        except ValueError as error:
            if not is_error:
                raise Unreadable(data) from error
            value = data.decode(errors="replace")
        if is_error and not (isinstance(value, dict) and value.get("error")):
            value = {"error": value}
        yield value


# -- JSON that is not quite JSON -------------------------------------------------------

#: OpenAI's own words for the log probability of a token that is very unlikely.
LOWEST_LOGPROB = -9999.0
#: Halves of characters, but for those that stand for bytes which are no UTF-8 (surrogateescape).
_HALVES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_OPEN_END = re.compile("[\ud800-\udfff]+$")


def loads_loosely(data: bytes) -> Any:
    """Return what servers write that is not quite JSON: halves of characters, -Infinity, newlines.

    Called only if orjson refuses it: what is paid for is not thrown away for the way it is
    written. `repaired` joins the halves of characters.

    Raises:
        ValueError: it cannot be read this way either.
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
    """Return the same without halves of characters: two that belong together are one character."""
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
    """Return a text that goes on later, without the character at its end that is not whole yet."""
    return repaired(_OPEN_END.sub("", text))  # type: ignore[no-any-return]


def _repaired(text: str) -> str:
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _HALVES.sub("\ufffd", text).encode("utf-8", "surrogateescape").decode(errors="replace")
