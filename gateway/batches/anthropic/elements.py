"""Takes a JSON object apart as it comes: the elements of one of its arrays, each as its own text.

The time grows with the bytes alone, whatever is nested in them and however long keys are. ijson
keeps the path to each value as a text, so a body of 600 kB took it 9 GB.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

from contract.errors import RequestRejected
from contract.openai.decode import MAX_VALUES, decode
from gateway.http.errors import ApiError, invalid

#: Deepest nesting of a value; orjson reads 1,024 levels.
MAX_LEVELS = 1000
#: An object may have so many fields. Anthropic documents one.
MAX_FIELDS = 100

_BLANK = re.compile(rb"[ \t\n\r]*+")
_SCALAR = re.compile(rb"[^ \t\n\r,{}\[\]]*+")
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
#: What stands before the next bracket, with all strings that are whole.
_PLAIN = re.compile(rb'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_OBJECT, _OBJECT_END, _ARRAY, _ARRAY_END, _QUOTE, _COMMA, _COLON = b'{}[]",:'

#: What needs more bytes yields; each piece goes on with it.
_Step = Generator[None, None, None]


class Elements:
    """The elements of the array `name` of an object that comes in pieces.

    `found` has those that are complete; who takes them removes them. Each call raises ApiError
    (400) for what is not JSON, nested too deep, or of too many values or fields.
    """

    def __init__(self, name: str) -> None:
        self.found: list[bytes] = []
        self._name = name
        self._text = bytearray()
        # What stands before `_start` is done with; what stands before `_at` has been looked at.
        self._start = self._at = 0
        self._complete = False
        self._steps = self._whole()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        del self._text[: self._start]
        self._at -= self._start
        self._start = 0
        self._text += data
        next(self._steps)

    def end(self) -> None:
        """Say that the object is complete."""
        if not self._complete:
            raise _not_json("it ends too early")

    # -- steps ---------------------------------------------------------------------------

    def _whole(self) -> _Step:
        if (yield from self._next()) != _OBJECT:
            told = f"the body is not a JSON object; give one with a list {self._name}"
            raise ApiError(400, told, param=self._name, code="invalid_json")
        self._take()
        more = (yield from self._next()) != _OBJECT_END
        fields = 0
        while more:
            fields += 1
            if fields > MAX_FIELDS:
                raise invalid(f"the body has more than {MAX_FIELDS} fields; leave out others")
            yield from self._field()
            more = yield from self._goes_on(_OBJECT_END)
        self._take()
        self._complete = True
        yield from self._next()
        raise _not_json("more follows after its end")

    def _field(self) -> _Step:
        if (yield from self._next()) != _QUOTE:
            raise _not_json("give a field's name in quotes")
        name = decoded((yield from self._value()), "a field's name")
        if (yield from self._next()) != _COLON:
            raise _not_json("a colon is missing after a field's name")
        self._take()
        if name == self._name and (yield from self._next()) == _ARRAY:
            yield from self._array()
        else:
            decoded((yield from self._value()), "a field")

    def _array(self) -> _Step:
        self._take()
        more = (yield from self._next()) != _ARRAY_END
        while more:
            self.found.append((yield from self._value()))
            more = yield from self._goes_on(_ARRAY_END)
        self._take()

    def _goes_on(self, end: int) -> Generator[None, None, bool]:
        """Return whether a comma is next, which is taken; else it must be the end."""
        found = yield from self._next()
        if found == _COMMA:
            self._take()
        elif found != end:
            raise _not_json("a comma or a bracket is missing after a value")
        return found == _COMMA

    def _next(self) -> Generator[None, None, int]:
        """Return the next byte that is not blank, and stay before it."""
        while True:
            self._at = self._start = _end(_BLANK, self._text, self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            yield

    def _take(self) -> None:
        self._at += 1
        self._start = self._at

    # -- values --------------------------------------------------------------------------

    def _value(self) -> Generator[None, None, bytes]:
        first = yield from self._next()
        if first in (_OBJECT, _ARRAY):
            yield from self._nested()
        elif first == _QUOTE:
            self._at += 1
            yield from self._string()
        else:
            yield from self._scalar()
        value = bytes(memoryview(self._text)[self._start : self._at])
        self._start = self._at
        return value

    def _scalar(self) -> _Step:
        while True:
            self._at = _end(_SCALAR, self._text, self._at)
            if self._at < len(self._text):
                return
            yield

    def _string(self) -> _Step:
        while True:
            self._at = _end(_IN_STRING, self._text, self._at)
            if self._at < len(self._text) and self._text[self._at] == _QUOTE:
                self._at += 1
                return
            yield  # at most a backslash is left

    def _nested(self) -> _Step:
        levels = opened = 0
        while True:
            self._at = _end(_PLAIN, self._text, self._at)
            if self._at == len(self._text):
                yield
                continue
            found = self._text[self._at]
            self._at += 1
            if found == _QUOTE:  # of a string that is not whole yet
                yield from self._string()
            elif found in (_OBJECT, _ARRAY):
                levels += 1
                opened += 1
                if levels > MAX_LEVELS:
                    told = f"the body is nested more than {MAX_LEVELS} levels deep; make it flatter"
                    raise ApiError(400, told, code="invalid_json")
                if opened > MAX_VALUES:
                    raise invalid(f"one request or field has more than {MAX_VALUES} JSON values")
            else:
                levels -= 1
                if not levels:
                    return


def decoded(text: bytes, what: str) -> Any:
    """Return a value's content.

    Raises:
        ApiError: 400, with `what` it is, if it is not JSON or has too many values.
    """
    try:
        return decode(text)
    except RequestRejected as error:
        told = error.message
        if error.code == "invalid_json":  # its advice is about lines of files
            told = told.partition(";")[0]
        raise ApiError(400, f"{what}: {told}", code=error.code) from None


def _not_json(told: str) -> ApiError:
    return ApiError(400, f"the body is not JSON: {told}", code="invalid_json")


def _end(pattern: re.Pattern[bytes], text: bytearray, at: int) -> int:
    """Return where a pattern that may match nothing ends."""
    found = pattern.match(text, at)
    return found.end() if found else at
