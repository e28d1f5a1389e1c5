"""Columns that are not the request are kept for the output, or passed over."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import uuid
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from kit.commands.table_sources import chunks_of, errors_of, parquet, requests_of, text_file
from pyarrow import csv

from producer.client.client import _source
from producer.input.options import BadOption
from producer.input.source import open_source
from producer.input.tables.kept import split_kept
from producer.input.tables.output_types import InputColumns, array, converter

PROMPT = {"prompt": "text"}
COLUMNS = {"id": [7, 8], "text": ["a", "b"], "label": ["x", None]}


def kept_of(source: Any, longest: int = 10**6) -> list[dict[str, Any]]:
    lines = [line for chunk in chunks_of(source, longest) for _, line in chunk.lines]
    return [orjson.loads(split_kept(line)[1]) for line in lines]


def test_a_column_that_is_not_the_request_is_passed_over(tmp_path: Path):
    name = parquet(tmp_path / "in.parquet", {"prompt": ["a"], "label": [1], "max_tokens": [3]})
    source = open_source(name)
    assert requests_of(source) == [{"prompt": "a", "max_tokens": 3}]
    assert source.unused == ["label"]
    assert source.output_columns == ""


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        (["id,label"], ["id", "label"]),
        (["label", "id"], ["label", "id"]),
        (["all"], ["id", "text", "label"]),
    ],
)
def test_kept_cells_are_beside_the_request(tmp_path: Path, keep: list[str], names: list[str]):
    source = open_source(parquet(tmp_path / "in.parquet", COLUMNS), PROMPT, keep)
    assert kept_of(source) == [{name: COLUMNS[name][n] for name in names} for n in (0, 1)]
    assert InputColumns.load(source.output_columns).keep == tuple(names)
    assert source.unused == [name for name in ("id", "label") if name not in names]


def test_the_kept_cells_are_part_of_the_digest(tmp_path: Path):
    name = parquet(tmp_path / "in.parquet", COLUMNS)
    other = parquet(tmp_path / "other.parquet", COLUMNS | {"label": ["x", "y"]})
    digests = [chunks_of(open_source(each, PROMPT, ["label"]))[0].digest for each in (name, other)]
    assert digests[0] != digests[1]
    assert (
        open_source(name, PROMPT, ["id"]).fingerprint() != open_source(name, PROMPT).fingerprint()
    )


def test_a_csv_and_rows_of_a_program_keep_columns(tmp_path: Path):
    name = text_file(tmp_path / "in.csv", "id,text,label\n7,a,x\n8,b,\n9,c\n")
    assert kept_of(open_source(name, PROMPT, ["id,label"])) == [
        {"id": "7", "label": "x"}, {"id": "8", "label": None}, {"id": None, "label": None}
    ]  # fmt: skip
    rows = [{"id": 7, "text": "a", "at": dt.date(2026, 1, 2)}, {"text": "b"}]
    assert kept_of(_source(rows, PROMPT, ["all"])) == [
        {"id": 7, "text": "a", "at": "2026-01-02"}, {"id": None, "text": "b", "at": None}
    ]  # fmt: skip
    frame = pa.table(COLUMNS)
    assert kept_of(_source(frame, PROMPT, ["label"])) == [{"label": "x"}, {"label": None}]


@pytest.mark.parametrize(
    ("keep", "told"),
    [(["lable"], "keep: there is no column 'lable'; did you mean label?"), ([","], "no column ''")],
)
def test_an_unknown_column_cannot_be_kept(tmp_path: Path, keep: list[str], told: str):
    with pytest.raises(BadOption, match="keep: ") as error:
        open_source(parquet(tmp_path / "in.parquet", COLUMNS), PROMPT, keep)
    assert told in error.value.message
    with pytest.raises(BadOption, match=r"keep: .* is not a table"):
        open_source(text_file(tmp_path / "in.jsonl", '{"prompt": "a"}\n'), {}, ["id"])


def test_a_cell_that_cannot_be_kept_fails_its_row_only(tmp_path: Path):
    numbers = pa.array([1.0, float("inf"), float("nan")])
    columns = {"id": ["a", "b", "c"], "text": ["x", "y", "z"], "n": numbers}
    source = open_source(parquet(tmp_path / "in.parquet", columns),
                         {**PROMPT, "custom_id": "id"}, ["n", "id"])  # fmt: skip
    (chunk,) = chunks_of(source)
    assert [line.startswith(b"{") for _, line in chunk.lines] == [True, False, True]
    problem, column, custom_id = orjson.loads(split_kept(chunk.lines[1][1])[0])
    assert (column, custom_id) == ("n", "b")
    assert "infinite" in problem
    assert [orjson.loads(split_kept(line)[1]) for _, line in chunk.lines] == [
        {"n": 1, "id": "a"}, {"n": None, "id": "b"}, {"n": None, "id": "c"}
    ]  # fmt: skip


BY_ID = {**PROMPT, "custom_id": "id"}
LONG = {
    "id": ["r1", "r2", "r3", "r4"],
    "text": ["a", "x" * 1200, "c", None],
    "source": ["s1", "s2", "s3", "s4"],
}
EMPTY_REQUEST = len(b'{"custom_id":"r2","prompt":""}')


def source_of(kind: str, folder: Path, columns: dict[str, Any], keep: list[str]) -> Any:
    rows, path = pa.table(columns), folder / f"in.{kind}"
    if kind == "csv":
        csv.write_csv(rows, path)
    elif kind == "parquet":
        parquet(path, columns)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows)
    else:
        return _source(rows if kind == "frame" else rows.to_pylist(), BY_ID, keep)
    return open_source(str(path), BY_ID, keep)


@pytest.mark.parametrize("keep", [["id", "source"], ["all"]])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv", "frame", "rows"])
def test_a_row_that_is_too_long_fails_with_its_id_and_its_kept_cells(
    tmp_path: Path, kind: str, keep: list[str]
):
    found = errors_of(source_of(kind, tmp_path, LONG, keep), 1000)
    assert {n: error.custom_id for n, error in found.items()} == {2: "r2", 4: "r4"}
    assert found[2].code == "line_too_long"
    size = f"(it has {EMPTY_REQUEST + 1200})"
    for fact in ("row 2", "1000 bytes", size, "WARMQ_MAX_LINE_BYTES"):
        assert fact in found[2].message
    assert found[2].message.endswith("text") == (keep == ["all"])
    names = ["id", "source"] if keep != ["all"] else ["id", "text", "source"]
    wanted = {**LONG, "text": ["a", None, "c", None]}
    assert kept_of(source_of(kind, tmp_path, LONG, keep), 1000) == [
        {name: wanted[name][n] for name in names} for n in range(4)
    ]


@pytest.mark.parametrize("keep", [[], ["text"]])
def test_the_request_is_measured_without_the_kept_cells(tmp_path: Path, keep: list[str]):
    longest = EMPTY_REQUEST + 1200
    source = source_of("parquet", tmp_path, LONG, keep)
    assert list(errors_of(source, longest)) == [4]
    assert list(errors_of(source.reopen(), longest - 1)) == [2, 4]


def test_kept_cells_that_are_too_long_fail_their_row_and_the_longest_are_left_out(tmp_path: Path):
    columns = {
        "id": ["r1", "r2", "r3"], "text": ["a", "b", None], "n": [1, 2, 3],
        "more": ["x" * 700, "x" * 700, "x" * 1500], "most": ["y" * 100, "y" * 900, None],
    }  # fmt: skip
    source = source_of("parquet", tmp_path, columns, ["n", "more", "most"])
    found = errors_of(source, 1000)
    assert {n: error.custom_id for n, error in found.items()} == {2: "r2", 3: "r3"}
    assert (found[2].code, found[2].field) == ("line_too_long", "most")
    for fact in ("row 2, column most", "1000 bytes", "WARMQ_MAX_LINE_BYTES"):
        assert fact in found[2].message
    assert "more" not in found[2].message.split("column")[1]
    assert (found[3].code, found[3].field) == ("invalid_request", "text")  # the first error stays
    assert found[3].message.endswith("more")
    assert kept_of(source.reopen(), 1000) == [
        {"n": 1, "more": "x" * 700, "most": "y" * 100},
        {"n": 2, "more": "x" * 700, "most": None},
        {"n": 3, "more": None, "most": None},
    ]


@pytest.mark.parametrize("text", ["x" * 1200, None])
def test_a_bad_row_has_no_id_that_a_request_may_not_have(tmp_path: Path, text: str | None):
    columns = {"id": ["r" * 2000, "", "r" * 512], "text": [text] * 3}
    source = source_of("parquet", tmp_path, columns, [])
    found = errors_of(source, 1000)
    assert [error.custom_id for error in found.values()] == [None, None, "r" * 512]


def test_requests_of_a_program_that_are_too_long_have_their_id():
    body = {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "x" * 1000}}
    found = errors_of(_source([{"custom_id": "a", "prompt": "x" * 1000}, body], {}), 1000)
    assert {n: (error.code, error.custom_id) for n, error in found.items()} == {
        1: ("line_too_long", "a"), 2: ("line_too_long", "b")
    }  # fmt: skip


def test_parts_with_other_types_are_refused(tmp_path: Path):
    parquet(tmp_path / "train-1.parquet", COLUMNS)
    parquet(tmp_path / "train-2.parquet", COLUMNS | {"id": ["c", "d"]})
    pattern = str(tmp_path / "train-*.parquet")
    assert len(requests_of(open_source(pattern, PROMPT))) == 4
    with pytest.raises(BadOption, match="other types in its kept columns"):
        chunks_of(open_source(pattern, PROMPT, ["id"]))


MOMENT = dt.datetime(2026, 1, 2, 3, 4, 5, 678_901)
TYPED = [
    pa.array([1, None], pa.int8()),
    pa.array([2**64 - 1, 0], pa.uint64()),
    pa.array([19.99, 16], pa.float32()),
    pa.array([0.1, -(2.0**60)], pa.float64()),
    pa.array([True, None], pa.bool_()),
    pa.array(["a", "\u2028"], pa.large_string()),
    pa.array([b"\0\xff", b""], pa.binary()),
    pa.array([b"12", b"34"], pa.binary(2)),
    pa.array([decimal.Decimal("1.10"), None], pa.decimal128(30, 2)),
    pa.array([MOMENT.date(), None], pa.date32()),
    pa.array([MOMENT.date(), dt.date(1000, 1, 1)], pa.date64()),
    pa.array([MOMENT.time(), dt.time()], pa.time64("us")),
    pa.array([MOMENT, dt.datetime(1900, 1, 1, 0, 0, 0, 1)], pa.timestamp("us")),
    pa.array([MOMENT, None], pa.timestamp("ms", "Asia/Seoul")),
    pa.array([1_700_000_000_123_456_789, -1], pa.timestamp("ns", "UTC")),
    pa.array([1, 86_399_999_999_999], pa.time64("ns")),
    pa.array([dt.timedelta(days=-1, microseconds=3), None], pa.duration("us")),
    pa.array([1, 2**40 + 1], pa.duration("ns")),
    pa.array([None, None], pa.null()),
    pa.array([["a", None], []], pa.list_(pa.string())),
    pa.array([[1.5, 2], None], pa.list_(pa.float32(), 2)),
    pa.array([{"a": 1, "b": [MOMENT]}, {"a": None, "b": None}],
             pa.struct([("a", pa.int64()), ("b", pa.list_(pa.timestamp("us")))])),
    pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
]  # fmt: skip
ODD = [
    *(
        (one, one)
        for one in (
            pa.array([[b"a", None], None], pa.list_(pa.binary())),
            pa.array([{"binary": "a"}, {"binary": "b"}]),
            pa.array([[("binary", b"\xff")], []], pa.map_(pa.string(), pa.binary())),
        )
    ),
    (pa.array(["a", "b"]).dictionary_encode(), pa.array(["a", "b"]).dictionary_encode()),
    (pa.array([1, 2]).dictionary_encode(), pa.array([1, 2])),
    (pa.array([1.5, None], pa.float16()), pa.array([1.5, None], pa.float32())),
    (pa.array([uuid.UUID(int=1).bytes], pa.uuid()), pa.array([str(uuid.UUID(int=1))])),
    (pa.array(["a"], pa.string_view()), pa.array(["a"])),
]


@pytest.mark.parametrize(("given", "wanted"), [*((a, a) for a in TYPED), *ODD], ids=str)
def test_kept_columns_have_their_types(tmp_path: Path, given: pa.Array, wanted: pa.Array):
    table = pa.table({"text": ["x"] * len(given), "c": given})
    path = tmp_path / "in.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    source = open_source(str(path), PROMPT, ["c"])
    types, _ = InputColumns.load(source.output_columns).arrow_types()
    convert = converter(types["c"])
    found = array([convert(row["c"]) for row in kept_of(source)], types["c"])
    assert found.type == wanted.type
    assert (
        found.to_pylist() == wanted.to_pylist() if "ns" not in str(found.type) else found == wanted
    )


def test_bytes_are_base64_where_there_are_no_types():
    assert kept_of(_source([{"text": "a", "b": b"\xff"}], PROMPT, ["b"])) == [
        {"b": base64.b64encode(b"\xff").decode()}
    ]


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_columns_of_folders_can_be_kept(tmp_path: Path, ending: str):
    for day in ("10", "2", "__HIVE_DEFAULT_PARTITION__"):
        folder = tmp_path / f"day={day}"
        folder.mkdir()
        if ending == "csv":
            text_file(folder / "0.csv", "text\nx\n")
        else:
            parquet(folder / "0.parquet", {"text": ["x"]})
    source = open_source(str(tmp_path), PROMPT, ["day"])
    assert [row["day"] for row in kept_of(source)] == ["2", "10", None]
    types, _ = InputColumns.load(source.output_columns).arrow_types()
    assert str(types["day"]) == "string"
    assert open_source(str(tmp_path), PROMPT).unused == ["day"]
    both = requests_of(open_source(str(tmp_path), {"prompt": "{text} {day}"}, ["all"]))
    assert [one["prompt"] for one in both[:2]] == ["x 2", "x 10"]
