"""Any way to cut, join, reorder or re-encode a recorded stream: the same answer, or an error."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.openai.body import CHAT_URL
from worker.engine.openai.dialect import Dialect
from worker.engine.openai.exchange import _receive
from worker.engine.openai.reassembly import Reassembly
from worker.engine.openai.retries import Condition, Unanswered

Json = dict[str, Any]
FORMS = Path(__file__).parents[4] / "kit" / "servers" / "server_forms"
NAMES = sorted(file.stem for file in FORMS.glob("*.sse"))
#: Beside them one with two choices, tool calls, log probabilities and characters beyond ASCII.
MIXED: list[Json] = [
    {"id": "m", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}},
                            {"index": 1, "delta": {"role": "assistant", "content": "\U0001f600"}}]},
    {"id": "m", "choices": [{"index": 1, "delta": {"content": "\uac00\U0001f3fd"}, "logprobs": {
        "content": [{"token": "a", "logprob": -1.5}]}}]},
    {"id": "m", "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "c", "type":
        "function", "function": {"name": "add", "arguments": ""}}]}}]},
    {"id": "m", "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {
        "arguments": '{"a": "\u00e9"}'}}]}}]},
    {"id": "m", "choices": [{"index": 1, "delta": {"content": "!"}, "logprobs": {
        "content": [{"token": "b", "logprob": -2.5}]}, "finish_reason": "length"}]},
    {"id": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"id": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 8}},
]  # fmt: skip


class Content:
    """What the exchange reads, as aiohttp gives it."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def at_eof(self) -> bool:
        return not self._pieces


def read(pieces: list[bytes], n: int = 1, *, done: bool = False) -> Json:
    """Return the answer of a server that is known to say [DONE], or not."""
    dialects: defaultdict[str, Dialect] = defaultdict(lambda: Dialect(sends_done=done))
    server: Any = SimpleNamespace(dialects=dialects, vllm=False, progress=lambda: None)
    response: Any = SimpleNamespace(content=Content(pieces))
    body = {"messages": [], "n": n}
    whole = Reassembly(CHAT_URL, body, vllm=False)
    return asyncio.run(_receive(server, CHAT_URL, body, response, whole))


def recorded(name: str) -> tuple[list[Json], int]:
    """Return a recorded stream's chunks, and how many choices it has."""
    if name == "mixed":
        return MIXED, 2
    lines = re.findall(rb"^data: (\{.*\})\r?$", (FORMS / f"{name}.sse").read_bytes(), re.MULTILINE)
    return [orjson.loads(line) for line in lines], 1


def shuffled(draw: Any, value: Any) -> Any:
    """Return the same value, the fields of its objects in another order."""
    if isinstance(value, dict):
        names = draw(st.permutations(list(value)))
        return {name: shuffled(draw, value[name]) for name in names}
    return [shuffled(draw, entry) for entry in value] if isinstance(value, list) else value


def cut_texts(draw: Any, chunk: Json) -> list[Json]:
    """Return the chunk as two whose deltas have a part of its texts each, halves of characters too.

    Ends, and what else is said once, stay with the second.
    """
    choices = chunk["choices"]
    texts = [c["delta"].get("content") for c in choices if isinstance(c.get("delta"), dict)]
    if len(choices) != 1 or not texts or not isinstance(texts[0], str) or "text" in choices[0]:
        return [chunk]
    units = texts[0].encode("utf-16-le")
    at = 2 * draw(st.integers(0, len(units) // 2))
    first, second = (part.decode("utf-16-le", "surrogatepass") for part in (units[:at], units[at:]))
    (choice,) = choices
    before = {"index": choice["index"], "delta": {"content": first}, "finish_reason": None}
    after = choice | {"delta": choice["delta"] | {"content": second}}
    return [{"id": chunk["id"], "choices": [before]}, chunk | {"choices": [after]}]


def event(draw: Any, chunk: Json, end: bytes) -> bytes:
    """Return a chunk as an event in one of the ways that there are to write one."""
    indent = draw(st.sampled_from([None, 1]))  # 1: over several lines
    try:
        data = json.dumps(chunk, ensure_ascii=draw(st.booleans()), indent=indent).encode()
    except UnicodeEncodeError:  # half a character, which only an escape can be
        data = json.dumps(chunk, indent=indent).encode()
    prefix = draw(st.sampled_from([b"data: ", b"data:"]))
    lines = [prefix + line for line in data.split(b"\n")]
    before = draw(st.sampled_from([[], [b": still at work"], [b"id: 7", b"retry: 10"], [b"data:"]]))
    return end.join([*before, *lines]) + end + end


@st.composite
def written(draw: Any) -> tuple[list[bytes], bytes, Json, int]:
    """Draw a stream in pieces, its bytes, the answer as it was recorded, and its choices."""
    chunks, n = recorded(draw(st.sampled_from([*NAMES, "mixed"])))
    end = draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    expected = read(
        [b"data: " + orjson.dumps(c) + b"\n\n" for c in chunks] + [b"data: [DONE]\n"], n
    )
    cut = [part for chunk in chunks for part in cut_texts(draw, chunk)]
    events = [event(draw, shuffled(draw, chunk), end) for chunk in cut]
    raw = b"".join(events) + b"data: [DONE]" + draw(st.sampled_from([b"", end, end + end]))
    raw = draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\n"])) + raw
    places = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]
    return pieces, raw, expected, n


@settings(max_examples=150, deadline=None)
@given(written())
def test_the_same_answer_however_it_is_cut_and_written(case: Any) -> None:
    pieces, _, expected, n = case
    assert read(pieces, n) == expected


@settings(max_examples=150, deadline=None)
@given(written(), st.floats(0, 1))
def test_half_a_stream_is_the_same_answer_or_none(case: Any, share: float) -> None:
    _, raw, expected, n = case
    try:
        found = read([raw[: int(share * len(raw))]], n, done=True)
    except Unanswered as fault:
        assert fault.what in (Condition.LOST, Condition.GARBLED)
    else:
        assert found == expected


@settings(max_examples=100, deadline=None)
@given(written(), st.data())
def test_an_error_in_between_is_told_in_the_servers_words(case: Any, data: st.DataObject) -> None:
    _, raw, _, n = case
    events = raw.split(b"\n\n")
    told = data.draw(st.sampled_from([
        b'data: {"error": {"message": "caught fire", "code": 502}}',
        b"event: error\ndata: caught fire", b'data: {"object": "error", "message": "caught fire"}',
    ]))  # fmt: skip
    events.insert(data.draw(st.integers(0, max(0, len(events) - 2))), told)
    try:
        read([b"\n\n".join(events)], n, done=True)
    except Unanswered as fault:
        assert "caught fire" in fault.message
    else:
        raise AssertionError("the error was passed over")


@given(st.binary(max_size=300), st.integers(1, 20))
def test_any_bytes_are_an_answer_or_a_fault(raw: bytes, size: int) -> None:
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    for begun in (b"", b"data: ", b'data: {"choices":['):
        try:
            found = read([begun, *pieces])
        except Unanswered as fault:
            assert fault.message
        else:
            assert found["choices"]
