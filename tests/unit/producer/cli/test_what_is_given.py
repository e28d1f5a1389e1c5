"""What a user gave is neither dropped nor overwritten: two sources, appended lines, odd names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from contract import naming
from contract.results import ResultLine, result_line
from contract.settings import Settings
from gateway.batches.api.output_lines import openai_line
from producer.cli.context import open_input
from producer.cli.options import parse_overrides
from producer.cli.show import put_json, put_json_list
from producer.client.client import submission_of
from producer.collect.outputs import ResultFile, replaceable
from producer.input.bucket import BadPlace, split_url
from producer.input.options import BadOption

LETTERS = "a\u2028b\u2029c\u0085d한"


@pytest.mark.parametrize(
    ("field", "mapped"),
    [
        ("messages", "messages.user"),
        ("messages", "prompt"),
        ("prompt", "messages.user"),
        ("max_tokens", "max_tokens"),
        ("stop", "stop"),
    ],
)
def test_two_sources_of_one_field_are_refused(field: str, mapped: str) -> None:
    with pytest.raises(BadOption, match=f"--set {field}: --map gives .* leave one out"):
        open_input("t.csv", (f"{mapped}=a",), {field: "x"})
    with pytest.raises(BadOption, match=f"fields {field}: columns gives"):
        submission_of({"fields": {field: "x"}, "columns": {mapped: "a"}}, Settings())


@pytest.mark.parametrize(
    "mapped", [("prompt=a", "messages.user=b"), ("messages.user=a", "input=b"), ("prompt", "input")]
)
def test_two_columns_that_are_each_the_request_are_refused(
    tmp_path: Path, mapped: tuple[str, ...]
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,b,prompt,input\n1,2,3,4\n")
    pairs = tuple(pair if "=" in pair else f"{pair}={pair}" for pair in mapped)
    with pytest.raises(BadOption, match="each is a whole request; give one"):
        open_input(str(table), pairs, {})


def test_a_field_is_set_once() -> None:
    with pytest.raises(BadOption, match="max_tokens is set already"):
        parse_overrides(("max_tokens=1", "max_tokens=2"))


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/a//x", "gs://b//x", "az://b/a/../x", "s3://b/./x", "s3://b/a//", "s3://b/..",
        "S3://b/a/../", "s3://b/a\nb", "gs://b/\x00/x",
    ],
)  # fmt: skip
def test_a_name_that_no_object_can_have_is_refused(url: str) -> None:
    with pytest.raises(BadPlace, match="its name has") as raised:
        split_url(url)
    assert "\n" not in raised.value.message
    assert split_url("s3://b/a/") == ("s3://b", "a/")
    assert split_url("s3://b/a..b/c.d") == ("s3://b", "a..b/c.d")


def _line(custom_id: str, batch: str = "mine") -> ResultLine:
    raw = orjson.dumps({
        "status": "SUCCESS", "result": {"text": LETTERS},
        "warmq": {"custom_id": custom_id, "line": 1, "timing": {}, "batch": batch},
    })  # fmt: skip
    return result_line(naming.request_id(batch, custom_id), custom_id, 1, raw)


@pytest.mark.parametrize("raw", ["stored", None])
def test_a_line_has_no_letter_that_ends_one(raw: str | None) -> None:
    line = _line(LETTERS) if raw else result_line("r", LETTERS, 1, None)
    for text in (line.json, openai_line(line)):
        assert len(text.decode().splitlines()) == 1
        assert json.loads(text)["custom_id"] == LETTERS
        assert "한" in text.decode()
    if raw:
        assert json.loads(line.json)["response"]["body"]["text"] == LETTERS


def test_json_that_is_printed_has_no_letter_that_ends_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_json({"text": LETTERS})
    put_json_list([{"text": LETTERS}, LETTERS])
    one, more = capsys.readouterr().out.splitlines()
    assert (json.loads(one), json.loads(more)) == ({"text": LETTERS}, [{"text": LETTERS}, LETTERS])


def test_what_has_changed_since_it_was_written_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    lines = [_line("a"), _line("b")]
    with ResultFile(str(path)) as file:
        for line in lines:
            file.add(line)
        marks = [file.sync()]
    assert replaceable(str(path), marks)
    mine = path.read_bytes()
    changed = [mine + more for more in (lines[0].json + b"\n", b'{"note": 1}\n', b"a note", b"\n")]
    changed += [mine[:-1], lines[0].json + b"\n", mine.replace(b'"text"', b'"tuxt"')]
    for content in changed:
        path.write_bytes(content)
        assert not replaceable(str(path), marks)
    path.write_bytes(b"")
    assert replaceable(str(path), [])


def test_an_internal_error_is_no_traceback_and_not_status_1() -> None:
    code = (
        "import sys; from producer.cli import main\n"
        "def broken(**_): raise KeyError('x')\n"
        "main.cli.main = broken; main.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 70
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith("producer: internal error: KeyError: 'x'")
