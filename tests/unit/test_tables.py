"""Tables as sources of lines: parquet, Arrow, CSV, folders of data sets, frames of a program."""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ExtraMissing, RequestRejected
from contract.openai.lines import parse_line
from producer import Client
from producer.core.reader import CHUNK_LINES, InputUnreadable, RawChunk
from producer.core.source import Source
from producer.core.sources import open_source
from producer.core.submission import BadOption
from producer.core.tables.frames import frame_source, is_frame
from producer.core.tables.mapping import RowMapping
from producer.core.tables.template import Template, is_template

SEED = "00" * 32
PROMPT = {"prompt": "text"}


def chunks_of(source: Source) -> list[RawChunk]:
    return list(source.chunks(SEED, 10**6))


def requests_of(source: Source) -> list[dict[str, Any]]:
    return [orjson.loads(line) for chunk in chunks_of(source) for _, line in chunk.lines]


def errors_of(source: Source) -> dict[int, RequestRejected]:
    """Return the errors of the lines that are no requests, in the table's own terms."""
    found = {}
    for chunk in chunks_of(source):
        for number, line in chunk.lines:
            try:
                parse_line(line)
            except RequestRejected as error:
                assert chunk.told is not None
                found[number] = chunk.told(number, line, error)
    return found


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> str:
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def text_file(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_each_row_is_a_line_with_the_fields_that_columns_are_mapped_to(tmp_path: Path):
    name = parquet(
        tmp_path / "in.parquet",
        {
            "id": [1, 2], "text": ["a", "b"], "n": [5, None],
            "heat": [decimal.Decimal("0.5"), decimal.Decimal(1)], "unused": [b"x", b"y"],
        },
    )  # fmt: skip
    source = open_source(
        name, {"prompt": "text", "custom_id": "id", "max_tokens": "n", "temperature": "heat"}
    )
    assert source.size == 2
    assert requests_of(source) == [
        {"custom_id": "1", "prompt": "a", "max_tokens": 5, "temperature": 0.5},
        {"custom_id": "2", "prompt": "b", "temperature": 1},
    ]
    assert source.position == 2


def test_without_a_mapping_each_column_is_the_field_of_its_name(tmp_path: Path):
    messages = [[{"role": "user", "content": "Hello"}]]
    whole = {"custom_id": ["a"], "messages": messages, "seed": [7]}
    assert requests_of(open_source(parquet(tmp_path / "a.parquet", whole))) == [
        {"custom_id": "a", "messages": messages[0], "seed": 7}
    ]
    lines = {"custom_id": ["a"], "url": ["/v1/completions"], "body": ['{"prompt": "x"}']}
    (line,) = requests_of(open_source(parquet(tmp_path / "b.parquet", lines)))
    assert parse_line(orjson.dumps(line)).body == b'{"prompt":"x"}'


def test_templates_fill_texts_numbers_dates_and_lists(tmp_path: Path):
    name = parquet(
        tmp_path / "in.parquet",
        {
            "text": ["a {b}"], "n": [3], "day": [dt.date(2026, 1, 2)], "yes": [True],
            "list": [[1, 2]], "a b": ["c"],
        },
    )  # fmt: skip
    pairs = {
        "messages.system": "On {day}: {{json}}",
        "messages.user": "{text}, {n} times, {yes}, {list}, {a b}",
    }
    assert requests_of(open_source(name, pairs)) == [
        {
            "messages": [
                {"role": "system", "content": "On 2026-01-02: {json}"},
                {"role": "user", "content": "a {b}, 3 times, true, [1,2], c"},
            ]
        }
    ]


def test_an_input_alone_makes_an_embedding(tmp_path: Path):
    name = parquet(tmp_path / "in.parquet", {"id": [1, 2], "text": ["a", None], "n": [1, 0]})
    source = open_source(name, {"input": "text", "custom_id": "id", "dimensions": "n"})
    assert requests_of(source)[0] == {
        "custom_id": "1", "url": "/v1/embeddings", "body": {"input": "a", "dimensions": 1}
    }  # fmt: skip
    (error,) = errors_of(source.again()).values()
    assert error.message == "row 2, column text: is empty; fill it, or leave the row out"


def test_a_column_with_braces_in_its_name_comes_before_a_template(tmp_path: Path):
    name = parquet(tmp_path / "in.parquet", {"{text}": ["whole"], "text": ["part"]})
    assert requests_of(open_source(name, {"prompt": "{text}"})) == [{"prompt": "whole"}]


@given(texts=st.lists(st.text(), min_size=1), values=st.lists(st.text()))
def test_any_text_can_be_written_in_a_template(texts: list[str], values: list[str]):
    names = [f"c{n}" for n in range(len(values))]
    escaped = [text.replace("{", "{{").replace("}", "}}") for text in texts]
    parts = [*escaped, *("{" + name + "}" for name in names)]
    template = Template.parse("prompt", "".join(parts))
    filled = template.fill(dict(zip(names, values, strict=True)))
    assert filled == "".join(texts) + "".join(values)
    assert is_template("".join(parts)) == bool(names)


def test_a_bad_cell_is_told_by_row_and_column_with_the_remedy(tmp_path: Path):
    name = parquet(
        tmp_path / "in.parquet",
        {"id": ["a", "b", "c"], "text": ["x", None, "y"], "n": [1, 1, -1], "raw": [b"x"] * 3},
    )
    pairs = {"prompt": "text", "max_tokens": "n", "custom_id": "id"}
    found = errors_of(open_source(name, pairs))
    assert found.keys() == {2, 3}
    assert found[2].message == "row 2, column text: is empty; fill it, or leave the row out"
    assert (found[2].custom_id, found[2].field) == ("b", "text")
    assert found[3].message.startswith("row 3, column n, field max_tokens: ")
    assert (found[3].custom_id, found[3].field) == ("c", "max_tokens")
    (error, *_) = errors_of(open_source(name, {"prompt": "raw"})).values()
    assert error.message == (
        "row 1, column raw: holds bytes, and a request has texts; decode the column first"
    )
    (error, *_) = errors_of(open_source(name, {"prompt": "about {text} and {raw}"})).values()
    assert "row 1, column raw" in error.message


def test_a_column_of_the_fields_own_name_is_not_named_twice(tmp_path: Path):
    name = parquet(tmp_path / "in.parquet", {"prompt": ["x"], "temperature": [9.0]})
    (error,) = errors_of(open_source(name)).values()
    assert error.message.startswith("row 1, column temperature: ")
    assert "give a number from 0 (greedy) to 2" in error.message


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ({}, "which column is the request? label is no field of one; map a field"),
        ({"max_tokens": "label"}, "which column is the request? map a field to one"),
        ({"prompt": "txt"}, "there is no column 'txt'; did you mean text?; there are text, label"),
        ({"prompt": "x {label} {tex}"}, "there is no column 'tex'"),
        ({"promt": "text"}, "field promt: no request has it; did you mean prompt?"),
        ({"prompt": "{text} {"}, "a single { at character 8; write {{"),
        ({"messages.boss": "text"}, "give one of messages.system, "),
        ({"messages": "text", "messages.user": "text"}, "give it one way"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused_before_anything_is_read(
    tmp_path: Path, pairs: dict[str, str], told: str
):
    name = parquet(tmp_path / "in.parquet", {"text": ["a"], "label": [1]})
    with pytest.raises(BadOption) as error:
        open_source(name, pairs)
    assert told in error.value.message


def test_a_table_gives_the_same_chunks_each_time_it_is_read(tmp_path: Path):
    count = 2 * CHUNK_LINES + 3
    texts = [f"question {n}" for n in range(count)]
    name = parquet(tmp_path / "in.parquet", {"text": texts}, row_group_size=170)
    source = open_source(name, PROMPT)
    first, again = chunks_of(source), chunks_of(source.again())
    assert [(c.cursor, c.digest) for c in first] == [(c.cursor, c.digest) for c in again]
    assert [c.cursor for c in first] == [CHUNK_LINES, 2 * CHUNK_LINES, count]
    assert source.fingerprint() == open_source(name, PROMPT).fingerprint()
    assert source.fingerprint() != open_source(name, {"prompt": "{text}!"}).fingerprint()
    other = parquet(tmp_path / "other.parquet", {"text": [*texts[:-1], "x"]}, row_group_size=170)
    assert source.fingerprint() != open_source(other, PROMPT).fingerprint()


def test_a_row_that_is_longer_than_a_line_may_be_is_skipped_and_told(tmp_path: Path):
    name = parquet(tmp_path / "in.parquet", {"text": ["a", "x" * 600_000, "b"]})
    (chunk,) = open_source(name, PROMPT).chunks(SEED, 1000)
    assert chunk.too_long == {2: 600_013}
    assert [number for number, line in chunk.lines if line] == [1, 3]


# -- CSV ---------------------------------------------------------------------


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
def test_csv_has_texts_and_numbers_where_a_field_wants_them(tmp_path: Path, packed: Any):
    text = '\ufeffid,text,n,stop\r\n1,"a, ""b""\r\nc",5,7\r\n\r\n2,[1],,\r\n'
    ending = "" if packed is bytes else ".gz"
    name = text_file(tmp_path / f"in.csv{ending}", packed(text.encode()))
    pairs = {"custom_id": "id", "prompt": "text", "max_tokens": "n", "stop": "stop"}
    assert requests_of(open_source(name, pairs)) == [
        {"custom_id": "1", "prompt": 'a, "b"\r\nc', "max_tokens": 5, "stop": "7"},
        {"custom_id": "2", "prompt": "[1]"},
    ]


def test_tabs_separate_the_cells_of_tsv(tmp_path: Path):
    name = text_file(tmp_path / "in.tsv", "text\tn\na, b\t1\n")
    assert requests_of(open_source(name, {"prompt": "{n}: {text}"})) == [{"prompt": "1: a, b"}]


def test_bad_rows_of_csv_are_told_and_the_others_stay(tmp_path: Path):
    name = text_file(tmp_path / "in.csv", b"id,text\n1,a\n2\n3,\n4,\xe9\n5,b\n")
    found = errors_of(open_source(name, {"prompt": "text", "custom_id": "id"}))
    assert [(n, found[n].custom_id) for n in found] == [(2, None), (3, "3"), (4, "4")]
    assert "row 2: has 1 cells, and the header names 2 columns" in found[2].message
    assert "row 3, column text: is empty" in found[3].message
    assert found[4].message == "row 4, column text: is not UTF-8; convert the file to UTF-8"


def test_a_bad_row_whose_own_name_is_not_utf_8_is_told_without_it(tmp_path: Path):
    name = text_file(tmp_path / "in.csv", b"id,text\n\xe9,a\n\xe9,\n\xc3\xa9,b\n")
    found = errors_of(open_source(name, {"prompt": "text", "custom_id": "id"}))
    assert [(n, found[n].custom_id) for n in found] == [(1, None), (2, None)]
    assert "row 1, column id: is not UTF-8" in found[1].message
    assert "row 2, column text: is empty" in found[2].message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no header"),
        ("a,a\n1,2\n", "two columns of the name 'a'"),
        ('a\n1\n"b" c\n', "after row 1, line 3"),
        ("a,é\n1,2\n".encode("utf-16"), "it is UTF-16; convert it to UTF-8"),
        ("a,é\n1,2\n".encode("latin-1"), "header that is not UTF-8; convert the file to UTF-8"),
    ],
)
def test_csv_that_cannot_be_read_says_where_and_what_to_do(
    tmp_path: Path, text: str | bytes, told: str
):
    name = text_file(tmp_path / "in.csv", text)
    with pytest.raises(InputUnreadable, match=told):
        chunks_of(open_source(name, {"prompt": "a"}))


def test_csv_needs_no_pyarrow_and_parquet_says_which_extra_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parquet_name = parquet(tmp_path / "in.parquet", {"text": ["a"]})
    csv_name = text_file(tmp_path / "in.csv", "text\na\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert requests_of(open_source(csv_name, PROMPT)) == [{"prompt": "a"}]
    with pytest.raises(ExtraMissing, match=r"pip install 'warmq\[tables\]'"):
        open_source(parquet_name, PROMPT)


# -- Arrow, folders of data sets -----------------------------------------------


@pytest.mark.parametrize("form", [pa.ipc.new_file, pa.ipc.new_stream])
def test_both_forms_of_arrow_files_are_read(tmp_path: Path, form: Any):
    table = pa.table({"text": ["a", "b", "c"], "more": [1, 2, 3]})
    path = tmp_path / "in.arrow"
    with form(str(path), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    assert [r["prompt"] for r in requests_of(open_source(str(path), PROMPT))] == ["a", "b", "c"]


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_a_file_that_is_damaged_or_of_another_kind_is_told(tmp_path: Path, ending: str):
    name = text_file(tmp_path / f"in{ending}", '{"prompt": "x"}\n')
    with pytest.raises(InputUnreadable, match=f"cannot read .*in{ending}: "):
        open_source(name)
    with pytest.raises(InputUnreadable, match="No such file"):
        open_source(str(tmp_path / f"none{ending}"))


def test_the_shards_of_a_data_sets_folder_are_read_in_their_order(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    for shard in range(3):
        parquet(data / f"train-{shard:05}-of-00003.parquet", {"text": [f"{shard}a", f"{shard}b"]})
    text_file(tmp_path / "README.md", "a card")
    texts = [f"{shard}{row}" for shard in range(3) for row in "ab"]
    for name in (str(tmp_path), str(data), str(data / "train-*.parquet")):
        source = open_source(name, PROMPT)
        assert [request["prompt"] for request in requests_of(source)] == texts
    parquet(data / "test-00000-of-00001.parquet", {"text": ["x"]})
    with pytest.raises(BadOption, match=r"several parts: give one of them, as '.*test-\*.parquet'"):
        open_source(str(tmp_path), PROMPT)
    assert len(requests_of(open_source(str(data / "train-*.parquet"), PROMPT))) == 6


@pytest.mark.parametrize(
    ("names", "other", "parts"),
    [
        (
            "data/train-0000{0}-of-00003-{1}a1b9d70c55e2f84.parquet",
            "data/test-00000-of-00001-4746b8785c874cc7.parquet",
            ("data/test-*.parquet", "data/train-*.parquet"),
        ),
        (
            "default/train/000{0}.parquet",
            "default/test/0000.parquet",
            ("default/test/*.parquet", "default/train/*.parquet"),
        ),
    ],
    ids=["pushed with a hash", "converted by the hub"],
)
def test_shards_that_are_named_otherwise_are_one_part_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: str,
    other: str,
    parts: tuple[str, str],
):
    files = [tmp_path / names.format(shard, "c7f"[shard]) for shard in range(3)]
    files[0].parent.mkdir(parents=True)
    for shard, path in enumerate(files):
        parquet(path, {"text": [f"{shard}a", f"{shard}b"]})
    texts = ["0a", "0b", "1a", "1b", "2a", "2b"]
    monkeypatch.chdir(files[0].parent)
    for name in (str(tmp_path), str(files[0].parent), "."):
        assert [r["prompt"] for r in requests_of(open_source(name, PROMPT))] == texts
    (tmp_path / other).parent.mkdir(exist_ok=True)
    parquet(tmp_path / other, {"text": ["x"]})
    with pytest.raises(BadOption, match="several parts") as error:
        open_source(str(tmp_path), PROMPT)
    for part in parts:
        assert repr(str(tmp_path / part)) in error.value.message
    assert [
        r["prompt"] for r in requests_of(open_source(str(tmp_path / parts[1]), PROMPT))
    ] == texts


def test_a_data_set_saved_to_disk_is_read(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.mkdir()
    shards = [f"data-{shard:05}-of-00002.arrow" for shard in range(2)]
    for shard, name in enumerate(shards):  # as datasets writes them: streams, and what they are
        table = pa.table({"text": [f"{shard}a", f"{shard}b"]})
        with pa.ipc.new_stream(kept / name, table.schema) as stream:
            stream.write_table(table)
    text_file(kept / "cache-1.arrow", "of another step")
    text_file(kept / "state.json", json.dumps({"_data_files": [{"filename": n} for n in shards]}))
    text_file(kept / "dataset_info.json", "{}")
    requests = requests_of(open_source(str(kept), PROMPT))
    assert [request["prompt"] for request in requests] == ["0a", "0b", "1a", "1b"]


def test_a_snapshot_of_the_hub_is_read_without_what_is_hidden_in_it(tmp_path: Path):
    snapshot = tmp_path / ".cache" / "hub" / "datasets--a--b" / "snapshots" / "0f"
    blobs = tmp_path / ".cache" / "hub" / "datasets--a--b" / "blobs"
    for folder in (snapshot / "data", snapshot / ".git", snapshot / ".cache", blobs):
        folder.mkdir(parents=True)
    for shard in range(2):
        parquet(blobs / f"b{shard}", {"messages": [[{"role": "user", "content": f"{shard}"}]]})
        link = snapshot / "data" / f"train-{shard:05}-of-00002.parquet"
        link.symlink_to(f"../../../blobs/b{shard}")
    for hidden in (snapshot / ".git" / "a.parquet", snapshot / ".cache" / "b.parquet"):
        parquet(hidden, {"messages": ["x"]})
    requests = requests_of(open_source(str(snapshot), {"messages": "messages"}))
    assert [request["messages"] for request in requests] == [
        [{"role": "user", "content": "0"}], [{"role": "user", "content": "1"}],
    ]  # fmt: skip


def test_a_later_file_without_a_column_is_named(tmp_path: Path):
    parquet(tmp_path / "a.parquet", {"text": ["a"]})
    parquet(tmp_path / "b.parquet", {"words": ["b"]})
    with pytest.raises(BadOption, match=r"b\.parquet has no column 'text'"):
        chunks_of(open_source(str(tmp_path / "*.parquet"), PROMPT))


def test_a_folder_or_pattern_without_tables_is_told(tmp_path: Path):
    with pytest.raises(InputUnreadable, match="it is a folder without"):
        open_source(str(tmp_path))
    with pytest.raises(InputUnreadable, match="no file is named like that"):
        open_source(str(tmp_path / "*.parquet"))
    text_file(tmp_path / "in.jsonl", "{}")
    with pytest.raises(BadOption, match="lines of JSON"):
        open_source(str(tmp_path / "in.jsonl"), PROMPT)


# -- frames ------------------------------------------------------------------


def frames() -> Iterator[Any]:
    columns = {"text": ["a", "b"], "n": [1, 2]}
    yield pa.table(columns)
    yield pa.table(columns).to_reader()
    for library in ("pandas", "polars"):
        try:
            yield __import__(library).DataFrame(columns)
        except ImportError:  # they are no package of ours
            continue


@pytest.mark.parametrize("frame", list(frames()), ids=lambda frame: type(frame).__module__)
def test_the_rows_of_a_frame_are_requests(frame: Any):
    assert is_frame(frame)
    source = frame_source(frame, {"prompt": "{text}{n}"})
    assert source.repeatable == hasattr(frame, "__len__")
    assert requests_of(source) == [{"prompt": "a1"}, {"prompt": "b2"}]
    if source.repeatable:
        assert source.size == 2
        assert requests_of(source.again()) == [{"prompt": "a1"}, {"prompt": "b2"}]


def test_rows_that_are_dicts_are_mapped_without_knowing_the_columns():
    mapping = RowMapping({"prompt": "text", "custom_id": "id"})
    assert orjson.loads(mapping.line({"text": "a", "id": 7})) == {"custom_id": "7", "prompt": "a"}
    assert b"is empty" in mapping.line({"id": 7})
    assert b"give a dict" in mapping.line(["a"])


def test_a_data_set_says_which_columns_it_has():
    class Rows(list[dict[str, str]]):
        column_names = ["text"]  # noqa: RUF012

    with pytest.raises(BadOption, match="there is no column 'txt'; did you mean text"):
        Client("redis://127.0.0.1:1/0").submit(Rows(), columns={"prompt": "txt"})
