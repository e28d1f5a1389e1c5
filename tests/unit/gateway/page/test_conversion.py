"""Uploads become lines of OpenAI's Batch API, in a process that a hostile file cannot leave."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import pytest

from contract.errors import RequestRejected
from contract.openai.lines import parse_line
from gateway.batches.runner.row_errors import explain
from gateway.page.conversion.lines import batch_line
from gateway.page.conversion.running import Conversion, convert
from gateway.page.file_plan import Choices
from producer.input.options import BadOption

CHAT = {"messages": [{"role": "user", "content": "x"}]}
WHOLE = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}


def made(value: object, **overrides: Any) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(batch_line(orjson.dumps(value), 7, overrides))
    return found


def test_the_short_form_gets_url_body_and_the_number_of_its_line() -> None:
    whole = {"custom_id": "line-7", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    assert made(CHAT) == whole
    assert made({"prompt": "x", "custom_id": "a"})["url"] == "/v1/completions"
    assert made(CHAT, max_tokens=5)["body"] == CHAT | {"max_tokens": 5}
    assert made({"url": "/v1/embeddings", "body": {"input": "x"}})["custom_id"] == "line-7"


def test_a_line_in_openais_form_stays_byte_for_byte() -> None:
    raw = b'{"custom_id": "a",  "url": "/v1/embeddings", "body": {"input": 1e5}}'
    assert batch_line(raw + b"\r\n", 1, {}) == raw
    assert made(WHOLE, model="m")["body"] == {"input": "x", "model": "m"}


@pytest.mark.parametrize("wrong", [[1], "x", None, {"temperature": 1}])
def test_what_is_no_request_is_refused(wrong: object) -> None:
    with pytest.raises(RequestRejected):
        made(wrong)


def run(path: Path, name: str, **pairs: str) -> tuple[Conversion, list[bytes]]:
    lines: list[bytes] = []
    return convert(path, name, pairs, {}, 10_000, lines.append, lambda: None), lines


def errors(lines: list[bytes]) -> dict[int, RequestRejected]:
    """Return the errors that a batch tells of lines, by their numbers."""
    found = dict[int, RequestRejected]()
    for number, line in enumerate(lines, 1):
        try:
            parse_line(line)
        except RequestRejected as error:
            found[number] = explain(number, line, error)
    return found


def test_lines_keep_their_numbers_and_a_name_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "stored"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n\n\n{"prompt": "b"}\n'))
    for name in ("x.jsonl", "..", "*", "-", "질문" * 120 + ".jsonl", "s3:__b_x"):
        found, lines = run(path, name)
        assert found == Conversion(changed=True), name
        assert [orjson.loads(line)["custom_id"] if line.strip() else "" for line in lines] == [
            "line-1", "", "", "line-4",
        ]  # fmt: skip


def test_a_table_has_columns_and_messages_name_the_users_file(tmp_path: Path) -> None:
    path = tmp_path / "stored"
    path.write_text("id,text\n1,a\n")
    found, lines = run(path, "데이터.csv", **{"messages.user": "{text}!", "custom_id": "id"})
    assert (found.columns, found.error) == (["id", "text"], "")
    assert orjson.loads(lines[0])["body"]["messages"][0]["content"] == "a!"
    path.write_bytes(b"PAR1 is not a table")
    found, _ = run(path, "t.parquet", prompt="text")
    assert "t.parquet" in found.error
    assert "warmq-page" not in found.error


def test_a_table_without_a_prompt_names_the_fields_of_the_page(tmp_path: Path) -> None:
    path = tmp_path / "stored"
    path.write_text("id,words\n1,a\n")
    found, _ = run(path, "t.csv")
    assert "unused columns: id, words" in found.error
    assert "User message" in found.error
    assert "messages.user" not in found.error


def test_a_bad_row_becomes_a_line_that_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "stored"
    table = {"id": ["a", "b", None, "d"], "text": ["x", None, None, "y"]}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    found, lines = run(path, "t.parquet", **{"messages.user": "{text}", "custom_id": "id"})
    assert (found.problems, found.error) == ([], "")
    refused = errors(lines)
    assert list(refused) == [2, 3]
    assert refused[2].message == "row 2, column text: is empty; fill it, or leave the row out"
    assert (refused[2].code, refused[2].field) == ("invalid_request", "text")
    assert [orjson.loads(line)["custom_id"] for line in lines] == ["a", "b", "line-3", "d"]
    assert [refused[2].custom_id, refused[3].custom_id] == ["b", "line-3"]


def test_a_value_that_is_wrong_for_its_field_names_row_and_column(tmp_path: Path) -> None:
    path = tmp_path / "stored"
    path.write_text("prompt,max_tokens,model\nx,5,a\ny,0,b\n")
    for name in ("t.csv", "t.jsonl"):
        found, lines = run(path, name)
        assert (found.problems, found.error) == ([], "")
        told = errors(lines)[2]
        where = "row 2, column max_tokens" if name == "t.csv" else "line 2, field max_tokens"
        assert told.message.startswith(f"{where}: is below 1; give a whole number"), name
        assert orjson.loads(lines[1])["body"] == {"model": "b"}, "it selects the queue"
        path.write_text('{"prompt":"x"}\n{"prompt":"y","max_tokens":0,"model":"b"}\n')


def test_a_row_that_is_too_long_fails_alone_with_its_id(tmp_path: Path) -> None:
    path = tmp_path / "stored"
    table = {"id": ["a", "b", "c"], "text": ["x", "y" * 2**20, "z"]}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    found, lines = run(path, "t.parquet", **{"messages.user": "{text}", "custom_id": "id"})
    assert (found.problems, found.error) == ([], "")
    (told,) = errors(lines).values()
    assert "WARMQ_MAX_LINE_BYTES" in told.message
    assert (told.code, told.custom_id) == ("line_too_long", "b")
    assert [orjson.loads(line)["custom_id"] for line in lines] == ["a", "b", "c"]


@pytest.mark.parametrize("field", ["prompt", "input", "messages"])
def test_a_bad_row_has_the_url_of_its_table(tmp_path: Path, field: str) -> None:
    path = tmp_path / "stored"
    value = '[{""role"": ""user"", ""content"": ""x""}]'
    path.write_text(f'{field},x\n"{value}",1\n"{value}"\n')
    found, lines = run(path, "t.csv")
    assert (list(errors(lines)), found.problems) == ([2], [])
    good, bad = map(orjson.loads, lines)
    assert bad["url"] == good["url"]


@pytest.mark.parametrize("mark", [";", "|", "\t"])
def test_the_delimiter_of_a_csv_file_is_found(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "stored"
    path.write_text(f"id{mark}text\n1{mark}a, b\n")
    found, lines = run(path, "t.csv", **{"messages.user": "{text}"})
    assert (found.columns, found.error, errors(lines)) == (["id", "text"], "", {})
    assert orjson.loads(lines[0])["body"]["messages"][0]["content"] == "a, b"


def test_the_process_ends_with_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "stored"
    path.write_bytes(b'{"prompt": "a"}\n' * 300_000)

    class Gone(Exception):
        pass

    def write(line: bytes) -> None:
        raise Gone

    with pytest.raises(Gone):
        convert(path, "x.jsonl", {}, {}, 10_000, write, lambda: None)


def test_choices_are_those_of_the_command(tmp_path: Path) -> None:
    sent = {"user": "Sum: {text}", "id": "key", "model": "m",
            "fields": "max_tokens=5\r\nstop=[\"a\"]\r\n\r\nuser=me"}  # fmt: skip
    found = Choices.of(sent)
    assert found.pairs == {"custom_id": "key", "messages.user": "Sum: {text}"}
    assert found.overrides == {"model": "m", "max_tokens": 5, "stop": ["a"], "user": "me"}
    assert Choices.of({"system": "x"}).pairs == {}


@pytest.mark.parametrize(("fields", "named"), [
    ("max_tokens=abc", "max_tokens"), ("max_tokns=5", "max_tokns"), ("max_tokens", "name=value"),
    ("max_tokens=8 temperature=0", "write each field on a line of its own"),
    ("max_tokens=8, temperature=0", "write each field on a line of its own"),
])  # fmt: skip
def test_a_bad_field_is_refused_as_the_command_does(fields: str, named: str) -> None:
    found = Choices.of({"fields": f"temperature=0\n{fields}"})
    assert named in found.problem
    with pytest.raises(BadOption):
        _ = found.overrides
    assert Choices.of({"fields": "max_tokens=5"}).problem == ""


def test_allowed_answers_are_those_of_the_command() -> None:
    found = Choices.of({"answers": " good, bad "})
    assert found.overrides == {"structured_outputs": {"choice": ["good", "bad"]}}
    assert Choices.of(found.as_query()) == found
    for wrong in ("a,a", "a,"):
        with pytest.raises(BadOption):
            _ = Choices.of({"answers": wrong}).overrides
    with pytest.raises(RequestRejected):
        made(CHAT | {"response_format": {"type": "json_object"}}, **found.overrides)
