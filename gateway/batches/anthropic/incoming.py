"""A create's body, taken apart as it comes: one line of an input file for each request.

Memory holds the request that is being read and 16 bytes for each custom_id.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import orjson

from contract.openai.numbers import whole
from gateway.batches.anthropic.elements import Elements, decoded
from gateway.batches.anthropic.protocol import ENDPOINT
from gateway.http.errors import ApiError, invalid
from gateway.store import Writer

#: Anthropic's own limits.
MOST_BYTES, MOST_REQUESTS = 256_000_000, 100_000
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: Lines are gathered to so many bytes before they are written.
_PIECE = 2**20


class Requests:
    """Takes a body in pieces, and writes its requests as lines.

    Each call raises ApiError: 400 or 413 naming what is wrong.
    """

    def __init__(self, writer: Writer, longest_line: int) -> None:
        self.count = 0
        self.written = 0
        self._writer = writer
        self._longest = longest_line
        self._size = self._since = 0
        self._running = hashlib.sha256()
        self._seen: set[bytes] = set()
        self._lines = bytearray()
        self._elements = Elements("requests")

    @property
    def digest(self) -> str:
        """The SHA-256 of all of the body so far, in hex."""
        return self._running.hexdigest()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._size += len(data)
        if self._size > MOST_BYTES:
            raise _too_large(f"the body has more than {MOST_BYTES} bytes; send several batches")
        self._running.update(data)
        # What is read of one request is in memory, so that has a bound, too.
        self._since += len(data)
        self._elements.feed(data)
        if self._elements.found:
            self._take()
            self._since = 0
        elif self._since > 2 * self._longest:
            raise _too_large(
                f"requests.{self.count}: more than {self._longest} bytes (WARMQ_MAX_LINE_BYTES)"
            )

    def end(self) -> None:
        """Say that the body is complete."""
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
        if digest in self._seen:
            told = f"{at}.custom_id: {custom_id} was used before; each must be unique"
            raise invalid(told, f"{at}.custom_id")
        self._seen.add(digest)
        _check(params, f"{at}.params")
        line = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": params}
        try:
            written = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:
            raise invalid(f"{at}.params: nested too deeply, or no Unicode", at) from None
        if len(written) > self._longest:
            raise _too_large(f"{at}: more than {self._longest} bytes (WARMQ_MAX_LINE_BYTES)")
        return written


def check_length(length: int) -> None:
    """Raise ApiError (413) for a body that is too large, before any of it is read."""
    if length > MOST_BYTES:
        error = _too_large(
            f"the body has {length} bytes, more than {MOST_BYTES}; send several batches"
        )
        error.close = True
        raise error


def _check(params: Any, at: str) -> None:
    """Look at what no request of a batch may have; all else is looked at when it is carried."""
    if not isinstance(params, dict):
        raise invalid(f"{at}: give the body of a POST to {ENDPOINT}, an object", at)
    if not isinstance(params.get("model"), str) or not params["model"]:
        raise invalid(f"{at}.model: name a model", f"{at}.model")
    tokens = whole(params.get("max_tokens"))
    if type(tokens) is not int or tokens < 1:
        raise invalid(f"{at}.max_tokens: give a whole number from 1", f"{at}.max_tokens")
    if not isinstance(params.get("messages"), list) or not params["messages"]:
        raise invalid(f"{at}.messages: give at least one message", f"{at}.messages")
    if params.pop("stream", False) not in (False, None):
        raise invalid(f"{at}.stream: answers of a batch are not streamed", f"{at}.stream")


def _too_large(message: str) -> ApiError:
    return ApiError(413, message, code="request_too_large", type="request_too_large")
