"""A cell of a table becomes what is written by hand as JSON, whatever Arrow makes of it."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import struct
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.openai.lines import check_body, parse_line
from producer.input.source import Source, open_source
from producer.input.tables.frames import frame_source

SEED = "00" * 32
#: A value of each Arrow type, and what is written for it; dates are texts in JSON.
CELLS: list[tuple[pa.DataType, Any, Any]] = [
    (pa.string(), "a", "a"),
    (pa.large_string(), "a", "a"),
    (pa.string_view(), "a", "a"),
    (pa.bool_(), True, True),
    (pa.int8(), 5, 5),
    (pa.uint64(), 2**63, 2**63),
    (pa.float16(), 0.1, 0.1),
    (pa.float32(), 19.99, 19.99),
    (pa.float32(), 1.4293244336113134e-43, 1.43e-43),
    (pa.float16(), 6e-8, 6e-8),
    (pa.float64(), 19.99, 19.99),
    (pa.float64(), 16.0, 16),
    (pa.float32(), float("nan"), None),
    (pa.decimal128(5, 2), decimal.Decimal("2.55"), 2.55),
    (pa.date32(), dt.date(2026, 1, 2), "2026-01-02"),
    (pa.date64(), dt.date(2026, 1, 2), "2026-01-02"),
    (pa.time64("ns"), 1_000_000_001, "00:00:01.000000001"),
    (pa.timestamp("us"), dt.datetime(9999, 12, 31), "9999-12-31T00:00:00"),
    (pa.timestamp("ns"), 1, "1970-01-01T00:00:00.000000001"),
    (pa.timestamp("ns", "UTC"), 1, "1970-01-01T00:00:00.000000001+00:00"),
    (pa.duration("ms"), dt.timedelta(seconds=1.5), 1.5),
    (pa.duration("ns"), 1_500_000_000, 1.5),
    (pa.dictionary(pa.int8(), pa.string()), "a", "a"),
    (pa.json_(), '{"a": [null, 1]}', {"a": [None, 1]}),
    (pa.map_(pa.string(), pa.int64()), [("a", 1)], {"a": 1}),
    (pa.map_(pa.int64(), pa.float32()), [(5, -100.0)], {"5": -100}),
    (pa.struct({"a": pa.int64(), "b": pa.string()}), {"a": 1, "b": None}, {"a": 1}),
    (pa.list_(pa.int64()), [1, None], [1, None]),
    (pa.large_list(pa.float32()), [0.1], [0.1]),
    (pa.list_(pa.string(), 2), ["a", "b"], ["a", "b"]),
    (pa.list_view(pa.string()), ["a"], ["a"]),
]


def array(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """Return an array; the JSON type is made of its texts, at any depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))
    return pa.array(values, kind)


def cells(column: pa.Array) -> list[Any]:
    """Return what requests have of a column."""
    table = pa.table({"prompt": ["x"] * len(column), "c": column})
    source = frame_source(table, {"prompt": "prompt", "chat_template_kwargs": "c"})
    return [line.get("chat_template_kwargs") for line in rows(source)]


def rows(source: Source) -> list[Any]:
    """Return its lines, decoded."""
    return [orjson.loads(line) for chunk in source.chunks(SEED, 10**6) for _, line in chunk.lines]


@pytest.mark.parametrize(("kind", "value", "written"), CELLS, ids=str)
def test_each_type_is_written_as_by_hand_also_nested(
    kind: pa.DataType, value: Any, written: Any
) -> None:
    plain = array(kind, [value, None])
    assert cells(plain) == [written, None]
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 2], pa.int32()), plain)
    assert cells(lists) == [[written, None], []]
    struct_ = pa.StructArray.from_arrays([plain], ["k"])
    assert cells(struct_) == [{} if written is None else {"k": written}, {}]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float32_is_the_shortest_number_that_it_is(value: float) -> None:
    found = cells(pa.array([value], pa.float32()))[0]
    assert struct.pack("f", found) == struct.pack("f", value + 0.0) or found == value == 0
    assert len(repr(float(found))) <= len(repr(float(value)))


def parquet(tmp_path: Path, columns: dict[str, Any], **options: Any) -> str:
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", **options)
    return str(tmp_path / "t.parquet")


def lines_of(name: str, pairs: dict[str, str]) -> list[Any]:
    return rows(open_source(name, pairs))


@pytest.mark.parametrize("year", [1000, 1816, 2300, 9999])
def test_a_date_of_spark_keeps_its_year(tmp_path: Path, year: int) -> None:
    dates = pa.array([dt.datetime(year, 12, 31)], pa.timestamp("us"))
    name = parquet(tmp_path, {"at": dates}, use_deprecated_int96_timestamps=True)
    assert lines_of(name, {"prompt": "{at}"})[0]["prompt"] == f"{year}-12-31T00:00:00"


_BAD = [
    pa.array([1, 2**31 - 1, 3], pa.int32()).cast(pa.date32()),
    pa.array([1, 2**62, 3], pa.int64()).view(pa.timestamp("us")),
    pa.array([1, 2**62, 3], pa.int64()).view(pa.duration("s")),
    pa.array([b"a", b"\xff", b"b"], pa.binary()).view(pa.string()),
]


@pytest.mark.parametrize("column", _BAD, ids=lambda column: str(column.type))
def test_a_cell_that_cannot_be_read_costs_its_row(column: pa.Array) -> None:
    for one in (column, pa.StructArray.from_arrays([column], ["k"])):
        source = frame_source(pa.table({"c": one}), {"prompt": "value {c}"})
        found = [
            orjson.loads(line) for chunk in source.chunks(SEED, 10**6) for _, line in chunk.lines
        ]
        assert [isinstance(line, dict) for line in found] == [True, False, True]
        assert found[1][1] == "c"


def test_a_zone_that_nobody_knows_costs_rows_and_not_the_file() -> None:
    column = pa.array([1], pa.timestamp("us", "Mars/Olympus"))
    source = frame_source(pa.table({"c": column}), {"prompt": "{c}"})
    (line,) = [
        orjson.loads(line) for chunk in source.chunks(SEED, 10**6) for _, line in chunk.lines
    ]
    assert line[1] == "c"
    assert "Mars/Olympus" in line[0]


def test_texts_of_numbers(tmp_path: Path) -> None:
    columns = {
        "f": pa.array([19.99, float("nan")], pa.float32()),
        "d": pa.array([decimal.Decimal("1E-7")] * 2, pa.decimal128(10, 7)),
        "y": pa.array([2020.0] * 2),
    }
    good, bad = lines_of(parquet(tmp_path, columns), {"prompt": "{f} {d} {y}", "custom_id": "y"})
    assert good == {"custom_id": "2020", "prompt": "19.99 0.0000001 2020"}
    assert bad[1:] == ["f", "2020"]


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("stop", '["a", "b"]', ["a", "b"]),
        ("stop", "[", "["),
        ("stop", "12", "12"),
        ("tool_choice", '{"type": "function"}', {"type": "function"}),
        ("tool_choice", "auto", "auto"),
    ],
)
def test_a_list_or_object_in_a_text_cell(
    tmp_path: Path, field: str, text: str, value: object
) -> None:
    name = parquet(tmp_path, {"p": ["[x]"], "c": [text]})
    assert lines_of(name, {"prompt": "p", field: "c"}) == [{"prompt": "[x]", field: value}]


def test_a_list_of_inputs_in_a_text_cell(tmp_path: Path) -> None:
    name = parquet(tmp_path, {"c": ['["a", "b"]', "a"]})
    assert [one["body"]["input"] for one in lines_of(name, {"input": "c"})] == [["a", "b"], "a"]


@pytest.mark.parametrize("field", ["max_tokens", "seed", "n", "top_k", "min_tokens", "logprobs"])
def test_whole_floats_are_whole_numbers(field: str) -> None:
    for form in ({}, {"url": "/v1/completions"}):
        body = {"prompt": "x", field: 1.0}
        line = form | {"body": body} if form else body
        queued = json.loads(parse_line(json.dumps(line).encode()).body)
        assert isinstance(queued[field], int)


def test_token_ids_may_be_whole_floats() -> None:
    assert check_body("/v1/embeddings", {"input": [[1.0, 2]]})["input"] == [[1, 2]]
    assert check_body("/v1/completions", {"prompt": [1.0, 2]})["prompt"] == [1, 2]
