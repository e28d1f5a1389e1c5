"""One request of a hostile client, and how it must end; `hostile_requests` lists them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import orjson

#: It is the client's mistake: 4xx, and never anything else.
REFUSED = "refused"
#: It is large, and right or wrong as the bounds say: 200, or 4xx.
EITHER = "either"
#: It is unusual and right: 200.
ANSWERED = "answered"

Body = dict[str, Any]
ASKED = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":4,'
HELLO = [{"role": "user", "content": "Hello"}]


class Hostile(NamedTuple):
    """One request; `body` makes the JSON object, or the bytes that stand in its place."""

    name: str
    url: str
    body: Callable[[], Body | bytes]
    ends: str = REFUSED

    def content(self, model: str) -> bytes:
        """Return the body as it is sent: it names the model unless it is no JSON object."""
        return _content(self.body, model)

    def line(self, model: str, custom_id: str) -> bytes:
        """Return it as a line of a batch."""
        head = {"custom_id": custom_id, "method": "POST", "url": self.url}
        return orjson.dumps(head)[:-1] + b',"body":' + self.content(model) + b"}"

    def fault(self, status: int, retry_after: str | None = None) -> str:
        """Return what is wrong with so ending, or nothing."""
        if self.ends != ANSWERED and 400 <= status < 500 and status != 429:
            return ""
        if self.ends != REFUSED and (status == 200 or (status == 503 and retry_after)):
            return ""
        return f"ended with {status}, wanted: {self.ends}"


@cache
def _content(body: Callable[[], Body | bytes], model: str) -> bytes:
    """Make a body once: some take a second, in which this process does nothing else."""
    made = body()
    return made if isinstance(made, bytes) else orjson.dumps({"model": model} | made)


def chat(**more: Any) -> Body:
    """Return a short chat."""
    messages = [{"role": "user", "content": "Hello"}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0} | more


def completion(**more: Any) -> Body:
    """Return a short completion."""
    return {"prompt": "Hello", "max_tokens": 4, "temperature": 0} | more


def deep(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    """Return JSON nested so deep."""
    return opening * depth + (b"1" if opening != b"[" else b"") + closing * depth


def names(count: int) -> list[str]:
    """Return texts that differ in their first characters."""
    return [f"{n:x}-{'value' * 3}" for n in range(count)]


def shaped(schema: Any) -> Body:
    """Return a chat whose answer must have a JSON schema."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return chat(response_format=form)


def tool(parameters: Any) -> Body:
    """Return a chat that must call a tool with these parameters."""
    function = {"name": "f", "strict": True, "parameters": parameters}
    return chat(tools=[{"type": "function", "function": function}], tool_choice="required")


def tree(depth: int) -> Body:
    """Return a schema of 2^depth objects."""
    leaf: Body = {"type": "string"}
    for _ in range(depth):
        leaf = {"type": "object", "properties": {"a": leaf, "b": leaf}, "required": ["a", "b"]}
    return leaf


def chain(depth: int) -> Body:
    """Return a schema of definitions, each of which refers twice to the next one."""
    definitions: Body = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"type": "array", "items": {
            "$ref": f"#/$defs/d{n + 1}"}}]}
        for n in range(depth)
    }  # fmt: skip
    definitions[f"d{depth}"] = {"type": "integer"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested(depth: int) -> Body:
    """Return a schema of arrays of arrays."""
    made: Body = {"type": "integer"}
    for _ in range(depth):
        made = {"type": "array", "items": made}
    return made
