"""Files that are neither JSON lines nor tables are named once, with the command that converts."""

from __future__ import annotations

import gzip
import io
import shlex
import subprocess
from contextlib import closing
from pathlib import Path

import orjson
import pytest
from kit.commands.table_sources import requests_of, text_file

from gateway.batches.runner.input_file import validate_input
from producer.input.options import BadOption
from producer.input.reader import Input, InputUnreadable
from producer.input.source import open_source

REQUESTS = [{"custom_id": str(n), "prompt": f"line {n}"} for n in range(60)]
LINES = b"".join(orjson.dumps(request) + b"\n" for request in REQUESTS)
PRETTY = b"\n".join(orjson.dumps(r, option=orjson.OPT_INDENT_2) for r in REQUESTS)
LISTS = {
    "on one line": orjson.dumps(REQUESTS),
    "indented": orjson.dumps(REQUESTS, option=orjson.OPT_INDENT_2),
    "an object on each line": b"[" + LINES.strip().replace(b"\n", b",\n") + b"]\n",
    "with a mark and blanks": b"\xef\xbb\xbf\r\n" + orjson.dumps(REQUESTS) + b"\r\n",
}
LARGE = orjson.dumps([{"prompt": "x" * 3_000_000}])


def refusal(path: str) -> str:
    with pytest.raises(InputUnreadable) as raised:
        open_source(path)
    assert raised.value.message.startswith(path)
    return raised.value.message


def prompts(path: str) -> list[str]:
    with closing(open_source(path)) as source:
        return [request["prompt"] for request in requests_of(source)]


@pytest.mark.parametrize("content", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("name", ["my requests.json", "a.jsonl"])
def test_one_json_list_is_named_with_the_line_of_jq(
    tmp_path: Path, content: bytes, name: str
) -> None:
    told = refusal(text_file(tmp_path / name, content))
    assert "one JSON list" in told
    command = told[told.index("jq -c") :]
    stem = name.partition(".")[0]
    read, written = str(tmp_path / name), str(tmp_path / f"{stem}.lines.jsonl")
    assert shlex.split(command) == ["jq", "-c", ".[]", read, ">", written]


@pytest.mark.parametrize("content", [
    PRETTY, b'{"prompt":\n"x"}\n', b"{\n" + b" " * 600_000,
    b'{"prompt": "x",\n "user": "' + b"y" * 600_000 + b'"}\n' + PRETTY,
    b'{"messages": [\n' + b'{"role": "user", "content": "y"},\n' * 20_000 + b"{}]}\n",
])  # fmt: skip
def test_objects_on_several_lines_are_named_with_the_line_of_jq(
    tmp_path: Path, content: bytes
) -> None:
    told = refusal(text_file(tmp_path / "a.json", content))
    assert "span several lines" in told
    assert f"jq -c . {tmp_path}/a.json > {tmp_path}/a.lines.jsonl" in told


def test_a_list_longer_than_a_line_may_be_is_named(tmp_path: Path) -> None:
    assert "one JSON list" in refusal(text_file(tmp_path / "a.json", LARGE))


@pytest.mark.parametrize(
    "content",
    [
        b'["a"]\n' + LINES,
        b'{"prompt": "cut\n' + LINES,
        b'{"prompt": "cut"\n' + LINES,
        b'{"prompt": "cut",\n' + LINES,
        b'{"prompt": 1,}\n' + LINES,
        b"hello\n" + LINES,
        b"{\n" + LINES,
        b'\n\n{"prompt": "x"}',
        b'{"prompt": "x"} trailing\n' + LINES,
        b"",
        b"\n",
    ],
)
def test_a_bad_line_among_others_is_its_own_error(tmp_path: Path, content: bytes) -> None:
    open_source(text_file(tmp_path / "a.jsonl", content)).close()


@pytest.mark.parametrize(
    ("encoding", "mark", "named"),
    [
        ("utf-16", b"", "UTF-16"),
        ("utf-16-le", b"", "UTF-16LE"),
        ("utf-16-be", b"", "UTF-16BE"),
        ("utf-16-be", b"\xfe\xff", "UTF-16"),
        ("utf-32", b"", "UTF-32"),
        ("utf-32-le", b"", "UTF-32LE"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_other_encodings_are_named_with_the_line_of_iconv(
    tmp_path: Path, encoding: str, mark: bytes, named: str, name: str
) -> None:
    text = LINES.decode() if name == "a.jsonl" else "prompt\nline 0\n"
    told = refusal(text_file(tmp_path / name, mark + text.encode(encoding)))
    assert f"it is {named}; " in told
    assert f"iconv -f {named} -t UTF-8 " in told
    subprocess.run(["bash", "-c", told[told.index("iconv -f") :]], check=True)
    assert prompts(str(tmp_path / name.replace(".", ".utf8.")))[0] == "line 0"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04\x14", "spreadsheet"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1", "spreadsheet"),
        (b"BZh91AY&SY", "bzip2"),
        (b"\xfd7zXZ\x00\x00", "xz"),
        (b"\x04\x22\x4d\x18d@", "lz4"),
        (b"PAR1\x15", ".parquet"),
        (b"ORC\x03", "ORC"),
        (b"Obj\x01\x04", "Avro"),
        (b"SQLite format 3\x00", "SQLite"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (gzip.compress(b"BZh91AY&SY"), "bzip2"),
        (gzip.compress("{}".encode("utf-16")), "UTF-16"),
        (gzip.compress(b"a.jsonl".ljust(257, b"\0") + b"ustar"), "tar"),
        (b"<!DOCTYPE html>\n<html>", "HTML"),
        (b"a question\nanother one\n", "must be a JSON object"),
        (b"id;text\n1;good\n", ".csv"),
        (b'"a"\n"b"\n', "must be a JSON object"),
    ],
)
@pytest.mark.parametrize("ending", [".jsonl", ".xlsx"])
def test_other_files_are_named_with_the_remedy(
    tmp_path: Path, content: bytes, words: str, ending: str
) -> None:
    path = text_file(tmp_path / f"a{ending}", content)
    assert words in refusal(path)
    with pytest.raises((BadOption, InputUnreadable), match=words):  # and not "leave --map out"
        open_source(path, {"prompt": "text"})


def test_a_pipe_with_one_list_is_refused_when_it_is_read() -> None:
    source = Input("-", io.BytesIO(LISTS["indented"]))
    with pytest.raises(InputUnreadable, match=r"-: .*jq -c '\.\[\]' FILE > FILE\.lines\.jsonl"):
        source.chunks(None, 10**6)


def test_a_gateway_reports_one_error_that_names_no_file_of_its_own(tmp_path: Path) -> None:
    for content in (*LISTS.values(), PRETTY):
        path = tmp_path / "file-1"
        path.write_bytes(content)
        (problem,) = validate_input(path, "/v1/completions", 10**6, 100).problems
        assert (problem.code, problem.line) == ("invalid_json_line", 1)
        assert "jq -c" in problem.message
        assert str(tmp_path) not in problem.message
