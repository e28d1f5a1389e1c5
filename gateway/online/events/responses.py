"""OpenAI's events of `/v1/responses`, and the fields that its answers have beside vLLM's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from contract.streaming import texts_of
from gateway.http.errors import ApiError
from gateway.online.request import OnlineRequest

#: As OpenAI answers a request that names none of them.
_LEFT_OUT: dict[str, Any] = {
    "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
    "temperature": None, "top_p": None,
}  # fmt: skip


#: What is raised of an answer that another program wrote, in a form that no endpoint has.
MALFORMED_ANSWER = (AttributeError, TypeError, LookupError, ValueError)


def complete_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response that has them; each text of its output has its `logprobs`, too."""
    output = [_item(item) for item in body.get("output") or ()]
    return {**_LEFT_OUT, **body, "output": output, "usage": _usage(body.get("usage"))}


def complete_response_json(body: bytes) -> bytes:
    """Do the same to an answer's JSON; what is no response stays as it is."""
    try:
        return orjson.dumps(complete_response(orjson.loads(body)))
    except MALFORMED_ANSWER:
        return body


def _usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    # No engine here charges for what it writes into its prefix cache, or counts it.
    details = {
        "cached_tokens": 0,
        "cache_write_tokens": 0,
        **(usage.get("input_tokens_details") or {}),
    }
    return {**usage, "input_tokens_details": details}


def _item(item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type") != "message":
        return dict(item)
    return {**item, "content": [_part(part) for part in item.get("content") or ()]}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "output_text" and part.get("logprobs") is None:
        return {**part, "logprobs": []}
    return dict(part)


class ResponseEvents:
    """Writes the events of one response; text that is streamed is that of its first message."""

    def __init__(self, asked: OnlineRequest, request_id: str) -> None:
        self._number = -1
        self._id = f"resp_{request_id}"
        self._item = f"msg_{request_id}"
        self._begun = False
        self._in_text = False
        self._response = {
            "id": self._id, "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "model": asked.model or "default", "output": [],
            "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None,
            "top_p": None, "usage": None,
        }  # fmt: skip

    def text(self, choice: int, piece: str) -> bytes:
        """Return the events for the next piece of the text."""
        out = self._begin()
        if not self._in_text:
            self._in_text = True
            out += self._open_text(0, self._item)
        return out + self._event("output_text.delta", **self._at(0, self._item), delta=piece,
                                 logprobs=[])  # fmt: skip

    def last(self, body: Mapping[str, Any], sent: Mapping[int, str]) -> Iterator[bytes]:
        """Yield the rest of the response."""
        yield self._begin()
        text = texts_of(body).get(0, "")
        if self._in_text and (rest := text[len(sent.get(0, "")) :]):
            yield self.text(0, rest)
        body = complete_response(body)
        items = body["output"]
        for number, item in enumerate(items):
            if item.get("type") != "message":
                yield from self._other(number, item)
            elif number == 0:
                item["id"] = self._item
                yield from self._message(number, item, opened=self._in_text)
            else:
                yield from self._message(number, item, opened=False)
        whole = {**body, "id": self._id, "output": items}
        ended = "incomplete" if body.get("status") == "incomplete" else "completed"
        yield self._event(ended, response=whole)

    def broken(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        told = error.body["error"]
        fields = {name: told[name] for name in ("code", "message", "param")}
        return self._event("error", prefix="", **fields)

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        created = self._event("created", response=self._response)
        return created + self._event("in_progress", response=self._response)

    def _open_text(self, number: int, item_id: str) -> bytes:
        item = {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress",
                "content": []}  # fmt: skip
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event("output_item.added", output_index=number, item=item)
        return added + self._event("content_part.added", **self._at(number, item_id), part=part)

    def _message(self, number: int, item: Mapping[str, Any], *, opened: bool) -> Iterator[bytes]:
        parts = item.get("content") or []
        at = self._at(number, item["id"])
        if not opened:
            yield self._open_text(number, item["id"])
            for part in parts[:1]:
                yield self._event("output_text.delta", **at, delta=part.get("text") or "",
                                  logprobs=[])  # fmt: skip
        for part in parts[:1]:
            text = part.get("text") or ""
            yield self._event("output_text.done", **at, text=text, logprobs=[])
            yield self._event("content_part.done", **at, part=part)
        yield self._event("output_item.done", output_index=number, item=item)

    def _other(self, number: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        yield self._event("output_item.added", output_index=number, item=item)
        if item.get("type") == "function_call":
            at: dict[str, Any] = {"item_id": item.get("id"), "output_index": number}
            arguments = item.get("arguments") or ""
            yield self._event("function_call_arguments.delta", **at, delta=arguments)
            yield self._event("function_call_arguments.done", **at, arguments=arguments,
                              name=item.get("name"))  # fmt: skip
        yield self._event("output_item.done", output_index=number, item=item)

    def _at(self, number: int, item_id: str) -> dict[str, Any]:
        return {"item_id": item_id, "output_index": number, "content_index": 0}

    def _event(self, kind: str, /, *, prefix: str = "response.", **fields: Any) -> bytes:
        self._number += 1
        told = {"type": prefix + kind, "sequence_number": self._number, **fields}
        return b"event: %b\ndata: %b\n\n" % ((prefix + kind).encode(), orjson.dumps(told))
