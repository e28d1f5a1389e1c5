"""What hostile calls are made of: values, headers, files and forms."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import orjson
import zstandard
from kit.hostile.hostile import NUMBERS, TEXTS
from kit.hostile.hostile_amounts import AMOUNTS
from kit.hostile.hostile_request import deep
from kit.hostile.hostile_requests import REQUESTS

from contract.openai.body import CHAT_URL

MODEL = "small"


class Call(NamedTuple):
    """One HTTP request, by the name of its kind."""

    kind: str
    method: str
    path: str
    headers: dict[str, str]
    content: bytes


FIELDS = (
    "messages", "prompt", "input", "text_1", "text_2", "query", "documents", "response_format",
    "structured_outputs", "tools", "tool_choice", "n", "max_tokens", "logit_bias", "stop", "user",
    "metadata", "stream", "stream_options", "temperature", "text", "system", "model", "logprobs",
)  # fmt: skip
#: Those of the list that are sent within a moment.
SMALL = [
    name for name in REQUESTS
    if not name.startswith(("logit_bias", "image that is")) and "MB" not in name
    and REQUESTS[name] not in AMOUNTS
]  # fmt: skip


def as_json(method: str, path: str, content: bytes) -> Call:
    """Return a call with a JSON body."""
    return Call("", method, path, {"content-type": "application/json"}, content)


def text(chance: random.Random) -> str:
    """Return a text that breaks something."""
    return chance.choice([*TEXTS, "é" * 3000, "1" * 400, "9" * 30, "-1"])


def value(chance: random.Random) -> Any:
    """Return a value that few fields may have."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: chance.choice(NUMBERS), lambda: text(chance), lambda: [text(chance)] * 500,
        lambda: {text(chance): chance.choice(NUMBERS)}, lambda: None, lambda: True,
        lambda: {f"k{n}": n for n in range(3000)}, lambda: [[[{}]]], lambda: [None] * 5000,
        lambda: [{"type": "text", "text": text(chance)}], lambda: list(range(20_000)),
    )  # fmt: skip
    return chance.choice(kinds)()


def spoilt(chance: random.Random, content: bytes) -> bytes:
    """Return mostly the content; sometimes with a piece cut out, or something deep in it."""
    drawn = chance.random()
    if drawn < 0.06:
        at = chance.randrange(len(content))
        return content[:at] + content[at + chance.randrange(9) :]
    if drawn < 0.14:
        depth = chance.choice([50, 400, 900, 1100, 5000, 100_000])
        opening, closing = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
        return content[:-1] + b',"unknown":' + deep(depth, opening, closing) + b"}"
    if drawn < 0.18:
        return chance.choice([b"", b"null", b"[]", b"\xff\xfe{}", b"\0", deep(100_000), b"1e999"])
    return content


def headers(chance: random.Random) -> dict[str, str]:
    """Return no header, or one that is large or strange."""
    if chance.random() < 0.7:
        return {}
    name, value = chance.choice([
        ("Idempotency-Key", "k" * chance.choice([1, 255, 256, 5000])), ("Idempotency-Key", "same"),
        ("Range", "bytes=" + ",".join(f"{n}-{n}" for n in range(2000))), ("Range", "bytes=-0"),
        ("Cookie", "; ".join(f"c{n}=v" for n in range(2000))), ("Accept", "text/event-stream"),
        ("Content-Type", "text/plain; charset=utf-16"), ("Content-Type", "multipart/form-data"),
        ("Content-Encoding", "gzip"), ("traceparent", "00-" + "f" * 300),
        ("Expect", "100-continue"),
        ("X-Request-Id", "r" * 3000), ("Authorization", "Bearer " + "k" * 8000),
        ("X-Partial-Results", "true"), ("If-None-Match", "*" * 3000), ("Connection", "close"),
        ("anthropic-version", "9" * 500), ("Accept-Language", "ko," * 4000),
    ])  # fmt: skip
    return {name: value}


@cache
def files() -> list[tuple[str, bytes]]:
    """Return files by name: right ones, and such as are larger or deeper than they look."""
    good = orjson.dumps({
        "custom_id": "a", "method": "POST", "url": CHAT_URL,
        "body": {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    })  # fmt: skip
    many = b"\n".join(good.replace(b'"a"', b'"a%d"' % n, 1) for n in range(50))
    deep_line = good[:-1] + b',"x":' + deep(5000) + b"}"
    zst, blank = zstandard.ZstdCompressor(19).compress, b"\n" * (32 * 2**20)
    hostile = b"\n".join(
        REQUESTS[name].line(MODEL, f"h{n}") for n, name in enumerate(SMALL)
        if REQUESTS[name].url == CHAT_URL
    )  # fmt: skip
    return [
        ("in.jsonl", good), ("in.jsonl", many), ("in.jsonl", hostile), ("in.jsonl", b""),
        ("in.jsonl", deep_line), ("in.jsonl", many + b"\n" + deep_line),
        ("in.jsonl", deep(100_000)),
        ("in.jsonl", b"\n" * 2_000_000), ("in.jsonl", b"\xef\xbb\xbf" + good), ("in.jsonl", b"[]"),
        ("in.jsonl", good + b"\n" + good), ("in.jsonl", b"\0" * 100_000), ("../../x", good),
        ("in.jsonl.gz", gzip.compress(many)), ("in.jsonl.gz", gzip.compress(blank)),
        ("in.jsonl.gz", gzip.compress(many)[:-9]),
        ("in.jsonl.gz", gzip.compress(gzip.compress(many))),
        ("in.jsonl.zst", zst(many)), ("in.jsonl.zst", zst(blank)),
        ("in.jsonl.zst", zst(b" " * 2**25)),
        ("in.jsonl.zst", zst(b"x" * 2**25)), ("in.jsonl.zst", zst(deep_line)),
        ("in.jsonl.zst", zst(good + b"\r" * 2**25)), ("in.jsonl.zst", zst(many)[:-5]),
        ("in.jsonl.zst", zst((good + b"\n") * 20_000)), ("in.jsonl.zst", good),
    ]  # fmt: skip


_BOUNDARY = b"b0"


def form(path: str, fields: dict[str, str], name: str, content: bytes) -> Call:
    """Return a form with a file."""
    parts = [
        b'Content-Disposition: form-data; name="%s"\r\n\r\n%s'
        % (field.encode(), value.encode("utf-8", "replace"))
        for field, value in fields.items()
    ]
    head = b'Content-Disposition: form-data; name="file"; filename="%s"' % name.encode()
    return _parts(path, [*parts, head + b"\r\n\r\n" + content])


def _parts(path: str, parts: Sequence[bytes], end: bytes = b"--\r\n") -> Call:
    body = b"".join(b"--%s\r\n%s\r\n" % (_BOUNDARY, part) for part in parts)
    kind = f"multipart/form-data; boundary={_BOUNDARY.decode()}"
    return Call("", "POST", path, {"content-type": kind}, body + b"--" + _BOUNDARY + end)


_FIELD = b'Content-Disposition: form-data; name="f"\r\n\r\nv'
FORMS: Sequence[Callable[[str], Call]] = (
    lambda path: _parts(path, [b"\r\n"] * 200_000),
    lambda path: _parts(path, [_FIELD] * 20_000),
    lambda path: _parts(path, [_FIELD + b"v" * 2_000_000]),
    lambda path: _parts(path, [_FIELD], end=b"--" + b"\r\n" * 1_000_000),
    lambda path: _parts(path, [], end=b"--\r\n"),
    lambda path: _parts(path, [_FIELD], end=b""),
    lambda path: _parts(path, [b"X: " + b"h" * 1_000_000 + b"\r\n\r\n"]),
    lambda path: _parts(path, [b"A: b\r\n" * 20_000 + b"\r\n"]),
    lambda path: _parts(path, [b"Content-Disposition: form-data; name*=utf-8''%ff\r\n\r\nx"]),
    lambda path: form(path, {"purpose": "batch"}, '"; x="\u202e', b"x"),
    lambda path: Call("", "POST", path, {"content-type": "multipart/form-data"}, b"x" * 1_000_000),
    lambda path: _parts(path, [_FIELD])._replace(content=b"\r\n" * 1_000_000),
)
