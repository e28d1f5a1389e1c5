"""Tables as sources of lines: parquet, Arrow, CSV, and what columns are mapped to."""

from __future__ import annotations

import csv
import datetime as dt
import decimal
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.commands.table_sources import SEED, chunks_of, errors_of, parquet, requests_of, text_file

from contract.errors import ExtraMissing
from contract.openai.lines import parse_line
from producer.input.options import BadOption
from producer.input.reader import CHUNK_LINES, InputUnreadable
from producer.input.source import open_source
from producer.input.tables.mapping import Template

PROMPT = {"prompt": "text"}


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
    (error,) = errors_of(source.reopen()).values()
    assert error.message == "row 2, column text: is empty; fill it, or leave the row out"


def test_a_column_with_braces_in_its_name_comes_before_a_template(tmp_path: Path):
    name = parquet(tmp_path / "in.parquet", {"{text}": ["whole"], "text": ["part"]})
    assert requests_of(open_source(name, {"prompt": "{text}"})) == [{"prompt": "whole"}]


@given(texts=st.lists(st.text(), min_size=1), values=st.lists(st.text()))
def test_any_text_can_be_written_in_a_template(texts: list[str], values: list[str]):
    names = [f"c{n}" for n in range(len(values))]
    escaped = [text.replace("{", "{{").replace("}", "}}") for text in texts]
    parts = [*escaped, *("{" + name + "}" for name in names)]
    template = Template.parse("messages.system", "".join(parts))
    filled = template.fill(dict(zip(names, values, strict=True)))
    assert filled == "".join(texts) + "".join(values)
    assert template.columns == tuple(names)


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
        ({}, "there is no prompt; unused columns: text, label; map a field to one"),
        ({"max_tokens": "label"}, "there is no prompt; unused columns: text; map a field to one"),
        ({"custom_id": "{text} {label}"}, "there is no prompt; map a field to one"),
        ({"prompt": "txt"}, "there is no column 'txt'; did you mean text?; there are text, label"),
        ({"prompt": "x {label} {tex}"}, "there is no column 'tex'"),
        ({"messages.user": "{text}", "messages.system": "Answer {good}"}, "{{ and }} for braces"),
        ({"messages.user": "{text}", "messages.system": 'Say {"a": 1}'}, "{{ and }} for braces"),
        ({"promt": "text"}, "field promt: not a field of a request; did you mean prompt?"),
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
    first, again = chunks_of(source), chunks_of(source.reopen())
    assert [(c.cursor, c.digest) for c in first] == [(c.cursor, c.digest) for c in again]
    assert [c.cursor for c in first] == [CHUNK_LINES, 2 * CHUNK_LINES, count]
    assert source.fingerprint() == open_source(name, PROMPT).fingerprint()
    assert source.fingerprint() != open_source(name, {"prompt": "{text}!"}).fingerprint()
    other = parquet(tmp_path / "other.parquet", {"text": [*texts[:-1], "x"]}, row_group_size=170)
    assert source.fingerprint() != open_source(other, PROMPT).fingerprint()


def test_a_row_that_is_longer_than_a_line_may_be_fails_alone(tmp_path: Path):
    name = parquet(tmp_path / "in.parquet", {"text": ["a", "x" * 600_000, "b"]})
    found = errors_of(open_source(name, PROMPT), 1000)
    assert [(n, found[n].code) for n in found] == [(2, "line_too_long")]
    assert "(it has 600013)" in found[2].message


# -- CSV ---------------------------------------------------------------------


@pytest.fixture
def csv_limit() -> Iterator[None]:
    """Give Python's limit of a CSV cell, which this process has in common, as it is at first."""
    before = csv.field_size_limit(128 * 2**10)
    yield
    csv.field_size_limit(before)


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


def test_a_row_whose_columns_have_no_character_asks_nothing(tmp_path: Path):
    rows = {"a": ["x", "", ""], "b": ["y", "y", ""]}
    name = parquet(tmp_path / "in.parquet", rows)
    for field in ("prompt", "input", "messages.user"):
        found = errors_of(open_source(name, {field: "A: {a} B: {b}"}))
        assert {n: one.message for n, one in found.items()} == {
            3: "row 3, column a, b: is empty; fill it, or leave the row out"
        }
        found = errors_of(open_source(name, {field: "a"}))
        assert list(found) == [2, 3], "a column is a template of itself"
    pairs = {"messages.system": "a", "messages.user": "{b}"}
    assert list(errors_of(open_source(name, pairs))) == [3], "a system message may be empty"


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


@pytest.mark.parametrize(("ending", "mark"), [(".csv", ","), (".tsv", "\t"), (".csv.gz", ",")])
def test_a_csv_row_beyond_the_limit_fails_alone_as_one_of_parquet_does(
    tmp_path: Path, csv_limit: None, ending: str, mark: str
):
    texts = ["a", "x" * 11_000_000, "y\n" * 4_000_000, "b"]
    rows = "".join(f'{n}{mark}"{text}"\n' for n, text in enumerate(texts, 1))
    content = f"id{mark}text\n{rows}".encode()
    packed = gzip.compress(content) if ending.endswith(".gz") else content
    sources = [
        open_source(text_file(tmp_path / f"in{ending}", packed), PROMPT),
        open_source(parquet(tmp_path / "in.parquet", {"id": [1, 2, 3, 4], "text": texts}), PROMPT),
    ]
    for source in sources:
        found = errors_of(source, 10 * 2**20)
        assert [(n, found[n].code) for n in found] == [(2, "line_too_long"), (3, "line_too_long")]
        assert "(it has 11000013)" in found[2].message
        assert "(it has 12000013)" in found[3].message
    raised = open_source(str(tmp_path / f"in{ending}"), PROMPT)
    assert errors_of(raised, 12_000_013) == {}
    assert raised.position == 4


@pytest.mark.parametrize(
    ("cell", "quoted", "facts"),
    [
        ("x" * 500_000, "x", ("row 2", "100000 bytes", "shorten it", "WARMQ_MAX_LINE_BYTES")),
        ("y\n" * 250_000, "y", ("row 2", "line 5", "400000", "twice", "WARMQ_MAX_LINE_BYTES")),
    ],
)
def test_a_csv_cell_of_several_times_the_limit_has_the_remedy_of_its_cause(
    tmp_path: Path, csv_limit: None, cell: str, quoted: str, facts: tuple[str, ...]
):
    name = text_file(tmp_path / "in.csv", f'text\n"a\nb"\n\n"{cell}"\nc\n')
    source = open_source(name, PROMPT)
    csv.field_size_limit(128 * 2**10)
    with pytest.raises(InputUnreadable) as raised:
        list(source.chunks(SEED, 100_000))
    for fact in facts:
        assert fact in raised.value.message
    assert ("quote" in raised.value.message) == (quoted == "y")


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ('text\na\n"b\nc\n\n', "row 2, from line 3: "),
        ('text\n"a\nb"\n\nc "\n"d\n', "row 3, from line 6: "),
        ('text,"b\nc\n', "header, from line 1: "),
    ],
)
def test_a_quote_without_an_end_is_named_where_its_row_begins(
    tmp_path: Path, text: str, begin: str
):
    with pytest.raises(InputUnreadable) as raised:
        chunks_of(open_source(text_file(tmp_path / "in.csv", text), PROMPT))
    assert begin in raised.value.message
    assert 'twice, ""' in raised.value.message


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
