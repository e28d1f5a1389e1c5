"""An output table has a row for each request, with the columns and types of the input."""

from __future__ import annotations

import csv
import datetime as dt
from pathlib import Path
from typing import Any

import orjson
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contract.results import ResultLine
from producer.collect.columns import OutputColumns
from producer.collect.outputs import ResultFile, check_output, error_file_of, table_ending
from producer.input.files import OutputUnwritable
from producer.input.tables.output_types import InputColumns

SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["good", "bad"]}, "stars": {"type": "integer"},
        "sure": {"type": ["boolean", "null"]}, "share": {"type": "number"},
        "tags": {"type": "array"}, "text": {"type": "string"},
    },
}  # fmt: skip


def answer(line: int, text: str, custom_id: str = "", /, **kept: Any) -> ResultLine:
    body = {
        "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    found = {"id": f"batch_req_{line}", "custom_id": custom_id or f"line-{line}", "error": None}
    found |= {"response": {"body": body}, "warmq": {"line": line}, "kept": kept}
    return ResultLine(orjson.dumps(found), False)


def failure(line: int, code: str, custom_id: str = "", /, **kept: Any) -> ResultLine:
    error = {"code": code, "message": f"{code}!", "line": line}
    found = {"id": f"batch_req_{line}", "custom_id": custom_id or f"line-{line}"}
    return ResultLine(orjson.dumps(found | {"error": error, "response": None, "kept": kept}), True)


def written(path: Path, columns: OutputColumns, *lines: ResultLine) -> Path:
    with ResultFile(str(path), columns=columns) as file:
        for line in lines:
            file.add(line)
        file.sync()
    return path


def columns_of(table: pa.Table, keep: list[str], custom_id: str = "", **overrides: Any):
    return OutputColumns(InputColumns.text_of(keep, custom_id, table.schema), overrides)


def test_all_rows_are_in_one_table_with_their_status(tmp_path: Path):
    lines = (
        answer(1, "yes"), failure(2, "max_tokens"), failure(3, "cancelled"), failure(4, "expired")
    )  # fmt: skip
    table = pq.read_table(written(tmp_path / "out.parquet", OutputColumns(), *lines))
    assert table.column_names == [
        "custom_id", "line", "status", "text", "finish_reason", "prompt_tokens",
        "completion_tokens", "error_code", "error_message", "response", "id",
    ]  # fmt: skip
    found = table.select(["line", "status", "text", "error_code", "completion_tokens"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [
        (1, "completed", "yes", None, 2), (2, "failed", None, "max_tokens", None),
        (3, "cancelled", None, "cancelled", None), (4, "expired", None, "expired", None),
    ]  # fmt: skip
    assert table["response"].null_count == 3


def test_kept_columns_and_the_custom_id_have_the_types_of_the_input(tmp_path: Path):
    table = pa.table(
        {
            "id": pa.array([7, 8, None], pa.int32()), "text": ["a", "b", "c"],
            "when": [dt.date(2026, 1, 2), None, None],
        }
    )  # fmt: skip
    columns = columns_of(table, ["id", "text", "when"], "id")
    lines = (
        answer(1, "yes", "7", id=7, text="a", when="2026-01-02"),
        failure(2, "invalid_request", "8", id=8, text="b", when=None),
        answer(3, "no", "", id=None, text="c", when=None),
    )  # fmt: skip
    found = pq.read_table(written(tmp_path / "out.parquet", columns, *lines))
    assert found.column_names[:6] == ["id", "input_text", "when", "custom_id", "line", "status"]
    assert found.column_names[-1] == "result_id"
    assert columns.renamed == {"text": "input_text"}
    kept = found.select(["id", "input_text", "when"]).rename_columns(["id", "text", "when"])
    assert kept == table
    assert found["custom_id"] == table["id"]
    assert found["text"].to_pylist() == ["yes", None, "no"]


def test_custom_ids_of_other_types(tmp_path: Path):
    for ids, texts in (
        (pa.array([dt.date(2026, 1, 2)]), ["2026-01-02"]),
        (pa.array([1.5]), ["1.5"]),
        (pa.array([2**63], pa.uint64()), [str(2**63)]),
        (pa.array([dt.datetime(2026, 1, 2, 3)]), ["2026-01-02T03:00:00"]),
        (pa.array(["a"]), ["a"]),
        (pa.array([dt.time(1, 2)]), ["01:02:00"]),
    ):
        columns = columns_of(pa.table({"k": ids}), [], "k")
        found = pq.read_table(written(tmp_path / "o.parquet", columns, answer(1, "x", texts[0])))
        assert found["custom_id"].combine_chunks() == ids


@pytest.mark.parametrize(
    "overrides",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": orjson.dumps(SCHEMA).decode()}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ],
)
def test_each_property_of_the_schema_is_a_column(tmp_path: Path, overrides: dict[str, Any]):
    whole = {"label": "good", "stars": 5, "sure": True, "share": 1, "tags": ["a"], "text": "t"}
    columns = columns_of(pa.table({"label": ["x"]}), ["label"], **overrides)
    lines = (
        answer(1, orjson.dumps(whole).decode(), label="gold"), answer(2, '{"label": "go'),
        answer(3, '{"stars": "five", "sure": null}'), answer(4, "[1]"), failure(5, "cancelled"),
    )  # fmt: skip
    found = pq.read_table(written(tmp_path / "out.parquet", columns, *lines))
    names = ["answer_label", "stars", "sure", "share", "tags", "answer_text"]
    assert [str(found.schema.field(name).type) for name in names] == [
        "string", "int64", "bool", "double", "string", "string"
    ]  # fmt: skip
    rows = found.select(names).to_pylist()
    assert list(rows[0].values()) == ["good", 5, True, 1.0, '["a"]', "t"]
    assert all(value is None for row in rows[1:] for value in row.values())
    assert found["label"].to_pylist() == ["gold", None, None, None, None]
    assert found["text"].to_pylist()[1] == '{"label": "go'


@pytest.mark.parametrize(("ending", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_csv_is_the_same_table_in_texts(tmp_path: Path, ending: str, delimiter: str):
    columns = OutputColumns(InputColumns.text_of(["id", "tags"], "", None))
    lines = (answer(1, 'a "b",\tc\nd', id="7", tags=["x", 1]), failure(2, "expired", id=None))
    path = written(tmp_path / f"out.{ending}", columns, *lines)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter=delimiter))
    assert list(rows[0]) == columns.names
    assert (rows[0]["id"], rows[0]["tags"], rows[0]["text"]) == ("7", '["x",1]', 'a "b",\tc\nd')
    assert (rows[1]["id"], rows[1]["text"], rows[1]["status"]) == ("", "", "expired")
    assert (rows[0]["line"], rows[0]["prompt_tokens"]) == ("1", "3")


@pytest.mark.parametrize("text", ["a\rb", "a\nb", "a\r\nb", "\r", 'a"b', "a,b", " a ", "\u2028"])
def test_any_text_is_one_cell_of_csv(tmp_path: Path, text: str):
    path = written(tmp_path / "out.csv", OutputColumns(), answer(1, text), answer(2, "b"))
    with path.open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == [text, "b"]
    assert pd.read_csv(path)["text"].tolist() == [text, "b"]
    assert path.read_bytes().count(b"\r") == text.count("\r")


def test_endings_of_tables_and_others():
    endings = {"a.pq": ".pq", "a.CSV": ".csv", "a.tsv": ".tsv", "a.jsonl": "", "s3://b/a.pq": ".pq"}
    assert {name: table_ending(name) for name in endings} == endings
    assert (error_file_of("a/b.csv"), error_file_of("a/b.jsonl")) == (None, "a/b.errors.jsonl")
    for name in ("a.csv.gz", "a.arrow", "a.feather"):
        with pytest.raises(OutputUnwritable, match=r"name a \.jsonl, \.parquet, \.csv or \.tsv"):
            table_ending(name)


def test_a_category_of_pandas_stays_one(tmp_path: Path):
    given = pd.DataFrame({"shop": pd.Series(["a", "b", "a"], dtype="category")})
    columns = columns_of(pa.Table.from_pandas(given), ["shop"])
    rows = [answer(n, "x", shop=shop) for n, shop in enumerate(["b", "a", None], 1)]
    found = pd.read_parquet(written(tmp_path / "out.parquet", columns, *rows))["shop"]
    assert (found.dtype, found.tolist()[:2]) == ("category", ["b", "a"])


@pytest.mark.parametrize("name", ["a.xls", "A.XLSX", "s3://b/a.ods"])
def test_a_spreadsheet_as_output_is_refused_with_the_endings_that_are_written(name: str):
    for check in (table_ending, check_output, error_file_of):
        with pytest.raises(OutputUnwritable, match=r"ends with \.csv.*\.parquet"):
            check(name)


def test_a_cell_that_does_not_fit_its_type_is_named(tmp_path: Path):
    columns = columns_of(pa.table({"n": pa.array([1], pa.int8())}), ["n"])
    with pytest.raises(OutputUnwritable, match="cannot write column n as int8"):
        written(tmp_path / "out.parquet", columns, answer(1, "x", n=4000))
    assert not (tmp_path / "out.parquet").exists()
