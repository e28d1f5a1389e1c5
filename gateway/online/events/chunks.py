"""Server-sent events of chats and completions, as OpenAI's clients read them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from contract.openai.body import CHAT_URL
from gateway.http.errors import ApiError
from gateway.online.request import OnlineRequest

DONE = b"data: [DONE]\n\n"


class ChunkEvents:
    """Writes the events of one answer: all have one id and time."""

    def __init__(self, asked: OnlineRequest, request_id: str) -> None:
        self._chat = asked.url == CHAT_URL
        self._options = asked.stream
        usage = bool(asked.stream and asked.stream.include_usage)
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        prefix = "chatcmpl-" if self._chat else "cmpl-"
        self._head = b"".join((
            b'data: {"id":', orjson.dumps(prefix + request_id), b',"object":', orjson.dumps(kind),
            b',"created":%d,"model":' % time.time(), orjson.dumps(asked.model or "default"),
            b',"choices":[',
        ))  # fmt: skip
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._begun: set[int] = set()

    def text(self, choice: int, piece: str) -> bytes:
        """Return a piece of one choice's text; before a chat's first one, its role."""
        if not self._chat:
            return self._one(
                b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'
                % (choice, orjson.dumps(piece))
            )
        return self._role(choice) + self._delta(choice, {"content": piece})

    def _role(self, choice: int) -> bytes:
        if choice in self._begun or not self._chat:
            return b""
        self._begun.add(choice)
        return self._delta(choice, {"role": "assistant", "content": ""})

    def _delta(self, choice: int, delta: Mapping[str, Any], logprobs: object = None) -> bytes:
        return self._one(
            b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}'
            % (choice, orjson.dumps(delta), orjson.dumps(logprobs))
        )

    def _one(self, choice: bytes) -> bytes:
        return self._head + choice + self._tail

    def last(self, body: Mapping[str, Any], sent: Mapping[int, str]) -> Iterator[bytes]:
        """Yield the rest of an answer: what of its texts was not sent, how each ended, usage.

        Args:
            body: the whole answer.
            sent: by choice, the text that was sent of it.
        """
        for number, choice in enumerate(body.get("choices") or ()):
            index = choice.get("index", number)
            yield self._rest(index, choice, sent.get(index))
            yield self._end(index, choice, body.get("usage"))
        if self._options and self._options.include_usage:
            usage = orjson.dumps(body.get("usage"))
            yield self._head + b'],"usage":' + usage + b"}\n\n"
        yield DONE

    def _rest(self, index: int, choice: Mapping[str, Any], sent: str | None) -> bytes:
        if self._chat:
            message = choice.get("message") or {}
            delta = {k: v for k, v in message.items() if v not in (None, [], "") and k != "role"}
            logprobs = choice.get("logprobs")
            if sent is not None:
                delta["content"] = (message.get("content") or "")[len(sent) :]
            if "tool_calls" in delta:
                delta["tool_calls"] = [
                    {"index": n, **call} for n, call in enumerate(delta["tool_calls"])
                ]
            if not any(delta.values()) and not logprobs:
                return self._role(index)
            return self._role(index) + self._delta(index, delta, logprobs)
        whole = {k: v for k, v in choice.items() if k not in ("finish_reason", "stop_reason")}
        whole["index"], whole["finish_reason"] = index, None
        whole["text"] = (choice.get("text") or "")[len(sent or "") :]
        return self._one(orjson.dumps(whole)) if whole["text"] or sent is None else b""

    def _end(self, index: int, choice: Mapping[str, Any], usage: object) -> bytes:
        told: dict[str, Any] = {"index": index}
        told["delta" if self._chat else "text"] = {} if self._chat else ""
        told |= {"logprobs": None, "finish_reason": choice.get("finish_reason")}
        if choice.get("stop_reason") is not None:
            told["stop_reason"] = choice["stop_reason"]
        head, end = self._head + orjson.dumps(told), self._tail
        if self._options and self._options.continuous_usage_stats and self._options.include_usage:
            end = b'],"usage":' + orjson.dumps(usage) + b"}\n\n"
        return head + end

    def broken(self, error: ApiError) -> bytes:
        """Return the events that end a stream with an error."""
        return b"data: " + orjson.dumps(error.body) + b"\n\n" + DONE
