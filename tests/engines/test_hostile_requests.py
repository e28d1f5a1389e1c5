"""What one client sends to a real engine does not stop the others, and is refused as its mistake.

The bodies go past the contract's bounds (tests/unit/contract/openai/test_structured_bounds.py), as
from an older producer: the engine bounds their time itself.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import pytest
from kit.hostile.engine_lines import Line, ended, small
from options.vision import make_vision_model

from contract.openai.body import CHAT_URL, COMPLETION_URL, COUNT_TOKENS_URL, TOKENIZE_URL
from demo.stack import MODEL

pytestmark = pytest.mark.timeout(300)
TEXT = {"type": "string"}


def schema(given: Any) -> Line:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}
    return CHAT_URL, small(0)[1] | {"response_format": wanted}


def structured(**given: Any) -> Line:
    return COMPLETION_URL, {"prompt": "a", "max_tokens": 8, "structured_outputs": given}


def fields(number: int, each: Any = None) -> dict[str, Any]:
    names = [f"p{n}" for n in range(number)]
    return {"type": "object", "properties": dict.fromkeys(names, each or TEXT), "required": names}


def optional(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": TEXT for n in range(number)}}


def tree(depth: int) -> dict[str, Any]:
    return fields(2, tree(depth - 1)) if depth else TEXT


def picture(*urls: str, **fields: Any) -> Line:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return CHAT_URL, asked | fields


def flat(width: int, height: int) -> str:
    """Return a black PNG, 1,000 times smaller than its pixels, as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


values = [f"value {n}" for n in range(100_000)]
CALLED = {"type": "function", "function": {"name": "f", "parameters": optional(5000)}}
LONG = {"messages": [{"role": "user", "content": "word " * 1_600_000}]}
#: By name: url and body, and what the error says.
HOSTILE: dict[str, tuple[Line, str]] = {
    "F1": (schema(TEXT | {"pattern": "^[a-z]{0,50000}$"}), "more than 2 s to compile"),
    "F1 again": (schema(TEXT | {"pattern": "^[a-z]{0,50000}$"}), "more than 2 s to compile"),
    "3,000": (schema(TEXT | {"pattern": "^[a-z]{0,3000}$"}), "is refused: Check failed"),
    "enum": (schema({"enum": values}), "more than 2 s"),
    "choice": (structured(choice=values), "more than 2 s"),
    "properties": (schema(optional(5000)), "more than 2 s"),
    "tree": (schema(tree(14)), "more than 2 s"),
    "options": (structured(regex="a?" * 2000 + "a" * 2000), "more than 2 s"),
    "lengths": (
        schema(fields(200, None) | {"properties": {
            f"p{n}": TEXT | {"maxLength": 1000 + n} for n in range(200)}}), "more than 2 s"),
    "nothing": (schema({"$ref": "#"}), "allows no text at all"),
    "false": (schema(fields(1) | {"properties": {"p0": False}}), "is refused"),
    "an open group": (structured(regex="(a"), "unclosed group"),
    "look ahead": (structured(regex="(?=a)b"), "look-around"),
    "no such rule": (structured(grammar="root ::= missing"), "is refused"),
    "tokens": (
        (TOKENIZE_URL, {"prompt": "word " * 3_000_000}), "15000000 characters; give at most 1310"),
    "tokens of a chat": ((TOKENIZE_URL, LONG), "give at most 131072"),
    "tokens of a message": ((COUNT_TOKENS_URL, LONG), "give at most 131072"),
    "a cut prompt": (
        (COMPLETION_URL, {"prompt": "word " * 999_999, "truncate_prompt_tokens": 10}), "at most"),
    "a cut chat": ((CHAT_URL, LONG | {"truncate_prompt_tokens": 10}), "give at most 131072"),
    "a file": (picture("file:///etc/hostname"), "tiny is not a multimodal model"),
    "a picture": (picture("data:image/png;base64,AAAA"), "tiny is not a multimodal model"),
}  # fmt: skip
HONEST: dict[str, Line] = {
    "fifty fields": schema(fields(50)),
    "fifty optional fields": schema(optional(50)),
    "five hundred values": schema({"enum": values[:500]}),
    "a choice": structured(choice=["yes", "no"]),
    "a pattern": schema(TEXT | {"pattern": "^[a-z]{1,20}$"}),
    "definitions": schema({
        "$defs": {"node": {"type": "object", "properties": {
            "name": TEXT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["name"]}},
        "type": "object", "properties": {"first": {"$ref": "#/$defs/node"}}, "required": ["first"],
    }),
    "long texts": schema(fields(3, TEXT | {"maxLength": 100_000})),
    "multiples": schema({"type": "integer", "multipleOf": 3}),
    "any object": (CHAT_URL, small(0)[1] | {"response_format": {"type": "json_object"}}),
    "a regex": structured(regex=r"\d{3}-\d{4}"),
    "tokens": (TOKENIZE_URL, {"prompt": "word " * 20_000}),
    "a cut prompt": (
        COMPLETION_URL,
        {"prompt": "word " * 20_000, "truncate_prompt_tokens": 10, "max_tokens": 4}),
}  # fmt: skip


#: The same of a model that sees.
PICTURES: dict[str, tuple[Line, str]] = {
    "large": (picture(flat(8000, 8000)), "VLLM_MAX_IMAGE_PIXELS"),
    "a bomb": (picture(flat(20_000, 20_000)), "exceed"),
    "many": (picture(*[flat(8, 8)] * 7), "At most 6 image(s)"),
    "a file": (picture("file:///etc/hostname"), "Cannot load local files"),
    "no such scheme": (picture("ftp://example.com/x.png"), "HTTP"),
    "damaged": (picture("data:image/png;base64,AAAA"), "image"),
    "no base64": (picture("data:image/png;base64,%%%"), "base64"),
    "cut short": (picture(flat(64, 64)[:90]), "image"),
    "made larger": (
        picture(flat(8, 8), mm_processor_kwargs={"size": {"longest_edge": 100_000}}),
        "longest_edge is 100000; give 0 to 4096"),
    "many frames": (
        picture(flat(8, 8), media_io_kwargs={"video": {"num_frames": -1}}), "give 0 to 64"),
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lines = {f"hostile {name}": line for name, (line, _) in HOSTILE.items()}
    lines |= {f"honest {name}": line for name, line in HONEST.items()}
    return ended(tmp_path_factory.mktemp("hostile"), lines)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("seeing")
    lines = {name: line for name, (line, _) in PICTURES.items()}
    lines["at the limits"] = picture(*[flat(4096, 3072)] * 6)
    return ended(folder, lines, make_vision_model(folder / "vision"))


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_that_is_wrong_is_refused(name: str, seen: dict[str, Any]) -> None:
    found = seen[name]
    assert found["kind"] == "RequestRejected", found
    assert PICTURES[name][1] in found["message"]
    assert found["grown_mb"] < 300
    assert found["other"]["kind"] == "answer"


def test_the_largest_pictures_that_are_taken_are_bounded_in_sum(seen: dict[str, Any]) -> None:
    found = seen["at the limits"]
    assert found["kind"] == "answer", found
    assert found["grown_mb"] < 1000
    assert found["other"]["kind"] == "answer"


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_as_a_mistake_while_others_are_answered(
    name: str, report: dict[str, Any]
) -> None:
    found = report[f"hostile {name}"]
    assert found["kind"] == "RequestRejected", found
    assert HOSTILE[name][1] in found["message"]
    assert str(MODEL) not in found["message"]
    assert "/models/" not in found["message"]
    assert found["took_s"] < 20, found
    assert found["pause_s"] < 1.5, found
    assert found["other"]["kind"] == "answer"
    assert found["other"]["took_s"] < 4, found


@pytest.mark.parametrize("name", HONEST)
def test_honest_constraints_and_texts_are_served(name: str, report: dict[str, Any]) -> None:
    found = report[f"honest {name}"]
    assert found["kind"] == "answer", found
    assert found["other"]["kind"] == "answer"


def test_what_was_refused_for_its_time_is_not_computed_again(report: dict[str, Any]) -> None:
    assert report["hostile F1 again"]["took_s"] < 1
