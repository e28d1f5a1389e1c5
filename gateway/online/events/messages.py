"""Anthropic's events and errors, of `/v1/messages`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from contract.streaming import texts_of
from gateway.http.errors import ApiError, anthropic_body
from gateway.online.request import OnlineRequest


class MessageEvents:
    """Writes the events of one message. It has one choice, whose text is its first block."""

    def __init__(self, asked: OnlineRequest, request_id: str) -> None:
        self._model = asked.model or "default"
        self._id = f"msg_{request_id}"
        self._begun = False
        self._in_text = False
        self._index = 0

    def text(self, choice: int, piece: str) -> bytes:
        """Return the events for the next piece of the text."""
        out = self._begin()
        if not self._in_text:
            self._in_text = True
            out += self._block({"type": "text", "text": ""})
        return out + self._delta({"type": "text_delta", "text": piece})

    def last(self, body: Mapping[str, Any], sent: Mapping[int, str]) -> Iterator[bytes]:
        """Yield the rest of the message."""
        rest = texts_of(body).get(0, "")[len(sent.get(0, "")) :]
        yield self._begin()
        if self._in_text:
            if rest:
                yield self.text(0, rest)
            yield self._stop()
        for block in body.get("content") or ():
            if block.get("type") != "text":
                yield self._whole(block)
            elif not sent:
                yield self._block({**block, "text": ""})
                yield self._delta({"type": "text_delta", "text": block.get("text") or ""})
                yield self._stop()
        told = {name: body.get(name) for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=told, usage=body.get("usage"))
        yield _event("message_stop")

    def broken(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        return b"event: error\ndata: " + anthropic_body(error, None) + b"\n\n"

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message: dict[str, Any] = {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model,
            "content": [], "stop_reason": None, "stop_sequence": None,
            # How many they are is known at the end, and told there.
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }  # fmt: skip
        return _event("message_start", message=message)

    def _whole(self, block: Mapping[str, Any]) -> bytes:
        """Return the events of a block that comes in one piece."""
        if block.get("type") == "tool_use":
            text = orjson.dumps(block.get("input") or {}).decode()
            delta = {"type": "input_json_delta", "partial_json": text}
            return self._block({**block, "input": {}}) + self._delta(delta) + self._stop()
        if block.get("type") == "thinking":
            delta = {"type": "thinking_delta", "thinking": block.get("thinking") or ""}
            empty = {**block, "thinking": "", "signature": ""}
            signed = {"type": "signature_delta", "signature": block.get("signature") or ""}
            return self._block(empty) + self._delta(delta) + self._delta(signed) + self._stop()
        return self._block(block) + self._stop()

    def _block(self, block: Mapping[str, Any]) -> bytes:
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        self._index += 1
        return _event("content_block_stop", index=self._index - 1)


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))
