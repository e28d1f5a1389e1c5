"""Writes the server-sent events of streamed answers, with one class for each API.

A writer's `text` returns the events for the next piece of a choice's text. `last` yields the
remaining events once the whole answer is known; `sent` has each choice's text that was sent.
`broken` returns the events that end a stream with an error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from contract.openai.body import CHAT_URL, MESSAGES_URL, RESPONSES_URL
from contract.streaming import texts_of
from gateway.http.errors import ApiError, anthropic_error
from gateway.online.request import OnlineRequest

DONE = b"data: [DONE]\n\n"
#: Fields that vLLM leaves out, with OpenAI's values for requests that do not set them.
_DEFAULTS: dict[str, Any] = {
    "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
    "temperature": None, "top_p": None,
}  # fmt: skip
#: Errors that a malformed answer raises. Only another program can have written such an answer.
MALFORMED_ANSWER = (AttributeError, TypeError, LookupError, ValueError)


def complete_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response with all of OpenAI's fields, and with `logprobs` for each text."""
    output, usage = [_with_logprobs(item) for item in body.get("output") or ()], body.get("usage")
    if usage is not None:
        # No engine counts the tokens that it writes into its prefix cache.
        details = {"cached_tokens": 0, "cache_write_tokens": 0}
        details |= usage.get("input_tokens_details") or {}
        usage = {**usage, "input_tokens_details": details}
    return {**_DEFAULTS, **body, "output": output, "usage": usage}


def complete_response_json(body: bytes) -> bytes:
    """Complete the JSON of a response; a malformed response stays as it is."""
    try:
        return orjson.dumps(complete_response(orjson.loads(body)))
    except MALFORMED_ANSWER:
        return body


def _with_logprobs(item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type") != "message":
        return dict(item)
    return {
        **item,
        "content": [_content_with_logprobs(content) for content in item.get("content") or ()],
    }


def _content_with_logprobs(content: Mapping[str, Any]) -> dict[str, Any]:
    lacks_logprobs = content.get("type") == "output_text" and content.get("logprobs") is None
    return {**content, "logprobs": []} if lacks_logprobs else dict(content)


class ChunkEvents:
    """Writes a chat's or completion's events; all have the same id and time."""

    def __init__(self, request: OnlineRequest, request_id: str) -> None:
        self._chat = request.url == CHAT_URL
        options = request.stream
        self._usage = bool(options and options.include_usage)
        self._usage_in_each = bool(options and options.continuous_usage_stats and self._usage)
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        prefix = "chatcmpl-" if self._chat else "cmpl-"
        self._head = b"".join((
            b'data: {"id":', orjson.dumps(prefix + request_id), b',"object":', orjson.dumps(kind),
            b',"created":%d,"model":' % time.time(), orjson.dumps(request.model or "default"),
            b',"choices":[',
        ))  # fmt: skip
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"
        self._begun_choices: set[int] = set()

    def text(self, choice: int, piece: str) -> bytes:
        """Return the events for a piece of one choice's text; a chat's role comes first."""
        if self._chat:
            return self._role(choice) + self._delta(choice, {"content": piece})
        return self._chunk(
            b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'
            % (choice, orjson.dumps(piece))
        )

    def _role(self, choice: int) -> bytes:
        if choice in self._begun_choices:
            return b""
        self._begun_choices.add(choice)
        return self._delta(choice, {"role": "assistant", "content": ""})

    def _delta(self, choice: int, delta: Mapping[str, Any], logprobs: object = None) -> bytes:
        return self._chunk(
            b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}'
            % (choice, orjson.dumps(delta), orjson.dumps(logprobs))
        )

    def _chunk(self, choice: bytes) -> bytes:
        return self._head + choice + self._tail

    def last(self, body: Mapping[str, Any], sent: Mapping[int, str]) -> Iterator[bytes]:
        """Yield the rest of an answer: text that was not sent, finish reasons, usage."""
        rest = self._rest_of_chat if self._chat else self._rest_of_completion
        for number, choice in enumerate(body.get("choices") or ()):
            index = choice.get("index", number)
            yield rest(index, choice, sent.get(index))
            yield self._end(index, choice, body.get("usage"))
        if self._usage:
            yield self._head + self._with_usage(body.get("usage"))
        yield DONE

    def _rest_of_chat(self, index: int, choice: Mapping[str, Any], sent: str | None) -> bytes:
        message, logprobs = choice.get("message") or {}, choice.get("logprobs")
        delta = {k: v for k, v in message.items() if v not in (None, [], "") and k != "role"}
        if sent is not None:
            delta["content"] = (message.get("content") or "")[len(sent) :]
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                {"index": n, **call} for n, call in enumerate(delta["tool_calls"])
            ]
        role = self._role(index)
        if any(delta.values()) or logprobs:
            return role + self._delta(index, delta, logprobs)
        return role

    def _rest_of_completion(self, index: int, choice: Mapping[str, Any], sent: str | None) -> bytes:
        rest = {k: v for k, v in choice.items() if k not in ("finish_reason", "stop_reason")}
        rest |= {"index": index, "finish_reason": None}
        rest["text"] = (choice.get("text") or "")[len(sent or "") :]
        return self._chunk(orjson.dumps(rest)) if rest["text"] or sent is None else b""

    def _end(self, index: int, choice: Mapping[str, Any], usage: object) -> bytes:
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        end = {"index": index, **content, "logprobs": None}
        end["finish_reason"] = choice.get("finish_reason")
        if choice.get("stop_reason") is not None:
            end["stop_reason"] = choice["stop_reason"]
        tail = self._with_usage(usage) if self._usage_in_each else self._tail
        return self._head + orjson.dumps(end) + tail

    def _with_usage(self, usage: object) -> bytes:
        return b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def broken(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""
        return b"data: " + orjson.dumps(error.body) + b"\n\n" + DONE


class MessageEvents:
    """Writes the events of Anthropic's messages: the text is streamed, other blocks come whole.

    A streamed text is block 0.
    """

    def __init__(self, request: OnlineRequest, request_id: str) -> None:
        self._model = request.model or "default"
        self._id = f"msg_{request_id}"
        self._begun = False
        self._in_text = False
        self._index = 0

    def text(self, choice: int, piece: str) -> bytes:
        """Return the events for the next piece of the text."""
        out = self._begin()
        if not self._in_text:
            self._in_text = True
            out += self._start_block({"type": "text", "text": ""})
        return out + self._delta(type="text_delta", text=piece)

    def last(self, body: Mapping[str, Any], sent: Mapping[int, str]) -> Iterator[bytes]:
        """Yield the rest of the message."""
        rest = texts_of(body).get(0, "")[len(sent.get(0, "")) :]
        yield self._begin()
        if self._in_text:
            if rest:
                yield self.text(0, rest)
            yield self._stop_block()
        for block in body.get("content") or ():
            if block.get("type") != "text" or not sent:  # otherwise the text was streamed
                yield self._whole_block(block)
        delta = {name: body.get(name) for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=delta, usage=body.get("usage"))
        yield _event("message_stop")

    def broken(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        body = anthropic_error(error.status, error.message, None)
        return b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message: dict[str, Any] = {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model,
            "content": [], "stop_reason": None, "stop_sequence": None,
            # The counts are known only at the end: the event `message_delta` has them.
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }  # fmt: skip
        return _event("message_start", message=message)

    def _whole_block(self, block: Mapping[str, Any]) -> bytes:
        """Return the events of a block that is sent in one piece."""
        kind = block.get("type")
        if kind == "text":
            text = self._delta(type="text_delta", text=block.get("text") or "")
            return self._start_block({**block, "text": ""}) + text + self._stop_block()
        if kind == "tool_use":
            json = orjson.dumps(block.get("input") or {}).decode()
            delta = self._delta(type="input_json_delta", partial_json=json)
            return self._start_block({**block, "input": {}}) + delta + self._stop_block()
        if kind == "thinking":
            empty = self._start_block({**block, "thinking": "", "signature": ""})
            text = self._delta(type="thinking_delta", thinking=block.get("thinking") or "")
            signed = self._delta(type="signature_delta", signature=block.get("signature") or "")
            return empty + text + signed + self._stop_block()
        return self._start_block(block) + self._stop_block()

    def _start_block(self, block: Mapping[str, Any]) -> bytes:
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop_block(self) -> bytes:
        self._index += 1
        return _event("content_block_stop", index=self._index - 1)


class ResponseEvents:
    """Writes the events of a response; only the text of its first message is streamed."""

    def __init__(self, request: OnlineRequest, request_id: str) -> None:
        self._number = -1  # sequence number of the last event
        self._id = f"resp_{request_id}"
        self._item = f"msg_{request_id}"
        self._begun = False
        self._in_text = False
        self._response = {
            **_DEFAULTS, "id": self._id, "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "model": request.model or "default", "output": [],
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": None,
        }  # fmt: skip

    def text(self, choice: int, piece: str) -> bytes:
        """Return the events for the next piece of the text."""
        out = self._begin()
        if not self._in_text:
            self._in_text = True
            out += self._open_text(0, self._item)
        return out + self._text_delta(0, self._item, piece)

    def last(self, body: Mapping[str, Any], sent: Mapping[int, str]) -> Iterator[bytes]:
        """Yield the rest of the response."""
        yield self._begin()
        text = texts_of(body).get(0, "")
        if self._in_text and (rest := text[len(sent.get(0, "")) :]):
            yield self.text(0, rest)
        body = complete_response(body)
        for number, item in enumerate(body["output"]):
            if item.get("type") != "message":
                yield from self._other_item(number, item)
                continue
            if number == 0:
                item["id"] = self._item
            yield from self._message(number, item, opened=self._in_text and number == 0)
        ended = "incomplete" if body.get("status") == "incomplete" else "completed"
        yield self._event(f"response.{ended}", response={**body, "id": self._id})

    def broken(self, error: ApiError) -> bytes:
        """Return the event that ends a stream with an error."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        created = self._event("response.created", response=self._response)
        return created + self._event("response.in_progress", response=self._response)

    def _open_text(self, number: int, item_id: str) -> bytes:
        item = {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress",
                "content": []}  # fmt: skip
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event("response.output_item.added", output_index=number, item=item)
        place = _place(number, item_id)
        return added + self._event("response.content_part.added", **place, part=part)

    def _text_delta(self, number: int, item_id: str, text: str) -> bytes:
        place = _place(number, item_id)
        return self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def _message(self, number: int, item: Mapping[str, Any], *, opened: bool) -> Iterator[bytes]:
        place = _place(number, item["id"])
        if not opened:
            yield self._open_text(number, item["id"])
        for part in (item.get("content") or [])[:1]:  # an engine's message has one part
            text = part.get("text") or ""
            if not opened:
                yield self._text_delta(number, item["id"], text)
            yield self._event("response.output_text.done", **place, text=text, logprobs=[])
            yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=number, item=item)

    def _other_item(self, number: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        yield self._event("response.output_item.added", output_index=number, item=item)
        if item.get("type") == "function_call":
            kind = "response.function_call_arguments"
            place = {"item_id": item.get("id"), "output_index": number}
            arguments, name = item.get("arguments") or "", item.get("name")
            yield self._event(f"{kind}.delta", **place, delta=arguments)
            yield self._event(f"{kind}.done", **place, arguments=arguments, name=name)
        yield self._event("response.output_item.done", output_index=number, item=item)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._number += 1
        return _event(kind, sequence_number=self._number, **fields)


def _place(number: int, item_id: str) -> dict[str, Any]:
    return {"item_id": item_id, "output_index": number, "content_index": 0}


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))


EventWriter = ChunkEvents | MessageEvents | ResponseEvents
_WRITERS: dict[str, type[EventWriter]] = {
    MESSAGES_URL: MessageEvents, RESPONSES_URL: ResponseEvents
}  # fmt: skip


def event_writer(request: OnlineRequest, request_id: str) -> EventWriter:
    """Return the writer of a request's events."""
    return _WRITERS.get(request.url, ChunkEvents)(request, request_id)
