"""No line of an input file can stop `submit`: it becomes a request or an error that names it."""

from __future__ import annotations

import io
import tracemalloc

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.commands.error_codes import error_codes
from kit.hostile.hostile import bodies, dump, examples, lines, spoilt
from kit.hostile.hostile_request import deep

from contract.errors import RequestRejected
from contract.message import MessageWriter, read_body, read_delivery
from contract.openai import lines as schema
from contract.openai.decode import MAX_VALUES, decode, printable
from contract.openai.lines import Request, parse_line
from contract.results import failure_meta, result_line
from producer.input.reader import CHUNK_LINES, Input, InputUnreadable, chunks

SEED = "00" * 32
MB = 2**20


def parsed(raw: bytes) -> Request | RequestRejected:
    """Parse a line; anything but a request or a clear refusal is an error of ours."""
    try:
        return parse_line(raw)
    except RequestRejected as error:
        assert error.code in error_codes()
        assert error.message.isprintable()
        assert len(error.message) < 600
        assert len(error.field or "") < 200
        return error


@examples(400)
@given(lines)
@example(b'{"prompt":"x","response_format":' + deep(1000, b'{"a":', b"}") + b"}")
@example(b'{"url":' + deep(1000) + b"}")
@example(b'{"prompt":"x","' + b"k" * 100_000 + b'":1}')
@example(b'{"prompt":"x","\\u001b]0;title\\u0007":1}')
@example(b'{"prompt":"x","logit_bias":{"' + b"k" * 100_000 + b'":"\\u0000"}}')
@example(b'{"url":"/v1/chat/completions","body":{"messages":[{"role":"user","con\xfftent":"hi"}]}}')
@example(b'{"url":"/v1/chat/completions","body":{"messages":[{"role":"user","x":"\xed\xa0\x80"}]}}')
@example(b'{"url":"/v1/chat/completions","body":{"messages":[{"role":"user","x":1e999}]}}')
def test_any_line_is_a_request_or_an_error_that_says_why(raw: bytes):
    result = parsed(raw)
    if isinstance(result, RequestRejected):
        meta = failure_meta("id", result, batch="b", custom_id=result.custom_id, line=1)
        assert result_line("id", "c", 1, meta).failed
        return
    # What is accepted comes out of the message as it went in.
    message = MessageWriter("b", 1, "life", "warmq", 6).write(
        "id", result.custom_id, 1, result.url, result.body
    )
    delivery = read_delivery("w/1", message)
    assert delivery.custom_id == result.custom_id
    assert read_body(delivery) == orjson.loads(result.body)


LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":%s}'


@examples(400)
@given(lines)
@example(LINE % b'{"prompt":"x","max_tokens":1.0}')
@example(LINE % b'{"prompt":"x","max_tokens":1e2,"temperature":1e400}')
@example(LINE % b'{"prompt":"\\ud800"}')
@example(LINE % b'{"prompt":"\xed\xa0\x80"}')
@example(LINE % b'{"prompt":"x","prompt":3}')
@example(LINE % b'{"prompt":"x","seed":18446744073709551616}')
@example(LINE % b'{"prompt":"x","response_format":{"a":1e999,"\\ud800":1}}')
@example(LINE % (b'{"prompt":"x","response_format":' + deep(251, b'{"a":', b"}") + b"}"))
@example(LINE % b'{"prompt":"x","stream":false}')
@example(LINE % b'{"prompt" \r\r:"x","temperature":1.50,"user":"\\u0041"}')
@example(b'{"url":"/v1/chat/completions","body":{"messages":[{"role":"user","x":1e999}]}}')
@example(LINE.replace(b'"a"', b'"' + "😀".encode() * 513 + b'"') % b'{"prompt":"x"}')
@example(b"\xef\xbb\xbf" + LINE % b'{"prompt":"x"}')
def test_the_short_way_for_good_lines_takes_nothing_that_the_long_way_refuses(raw: bytes):
    short = schema._plain_line(raw)
    if short is not None:
        long = schema._any_line(raw, {})
        assert (short.custom_id, short.url) == (long.custom_id, long.url)
        assert orjson.loads(short.body) == orjson.loads(long.body)


@examples(150)
@given(
    st.lists(st.binary(max_size=300) | st.builds(dump, bodies), max_size=40), st.integers(1, 200)
)
def test_any_bytes_are_cut_into_the_same_lines_and_nothing_is_lost(pieces: list[bytes], limit: int):
    raw = b"\n".join(pieces)
    found = list(chunks(io.BufferedReader(io.BytesIO(raw)), SEED, limit))
    wanted = {n: line for n, line in enumerate(raw.split(b"\n"), 1)}
    assert all(len(chunk.lines) <= CHUNK_LINES for chunk in found)
    for chunk in found:
        for number, line in chunk.lines:
            if number in chunk.too_long:
                assert len(wanted[number].rstrip(b"\r")) > limit
            elif number > 1:
                assert line.rstrip(b"\r\n") == wanted[number].rstrip(b"\r\n")
    taken = {number for chunk in found for number, _ in chunk.lines}
    left_out = [line for number, line in wanted.items() if number not in taken]
    assert all(not line.strip() or line == b"\xef\xbb\xbf" for line in left_out)


@examples(150)
@given(
    st.sampled_from([b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18", b""]),
    st.binary(max_size=200),
)
def test_damaged_compressed_input_ends_in_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, magic: bytes, rest: bytes
):
    path = tmp_path_factory.mktemp("input") / "damaged"
    path.write_bytes(magic + rest)
    source = Input(str(path))
    try:
        list(chunks(source.lines(), SEED, 1000))
    except InputUnreadable as error:
        # Random bytes may also begin as a file of another form does, for example as xz.
        assert "line" in error.message or "it is " in error.message
    finally:
        source.close()


@pytest.mark.parametrize(
    "unit", [b"[],", b"{},", b'{"a":{}},', b"1.5,", b'"ab",', b'"",', b'{"b":[1]},'], ids=repr
)
def test_a_line_of_pure_structure_is_refused_before_it_fills_the_memory(unit: bytes):
    raw = b'{"prompt":[' + unit * (10 * MB // len(unit)) + unit[:-1] + b"]}"
    tracemalloc.start()
    with pytest.raises(RequestRejected, match="JSON values"):
        parse_line(raw)
    assert tracemalloc.get_traced_memory()[1] < 20 * MB
    tracemalloc.stop()


@pytest.mark.parametrize(
    "prompt", ["a, b [c] {d} " * (10 * MB // 13), '\\",[' * (2 * MB)], ids=["prose", "escaped"]
)
def test_a_long_prompt_is_not_taken_for_structure(prompt: str):
    raw = orjson.dumps({"prompt": prompt})
    assert parse_line(raw).body == raw


def test_a_prompt_of_many_token_ids_is_accepted():
    raw = b'{"prompt":[' + b"31999," * (MAX_VALUES - 10) + b"1]}"
    assert parse_line(raw).body == raw


def test_an_unclosed_string_of_ten_megabytes_is_refused_in_linear_time():
    with pytest.raises(RequestRejected):
        decode(b'"\\"' + b'\\",' * (10 * MB // 3))


@examples(100)
@given(st.text(max_size=300))
def test_a_text_is_shown_short_and_printable(text: str):
    assert printable(text).isprintable()
    assert len(printable(text)) < 80 * 10 + 2


@examples(200)
@given(spoilt(st.just(
    MessageWriter("b", 1, "life", "warmq", 6).write(
        "id", "c", 1, "/v1/completions", b'{"prompt":"x"}')
)))  # fmt: skip
def test_a_spoilt_message_is_read_or_refused(raw: bytes):
    try:
        read_body(read_delivery("w/1", raw))
    except RequestRejected as error:
        assert error.message
