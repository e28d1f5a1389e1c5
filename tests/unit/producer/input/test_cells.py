"""Cells that Arrow, pandas or CSV write oddly: each is what was meant, or its row's error.

test_any_arrow_type.py says of any value of a type what is written for it.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pyarrow as pa
import pytest
from kit.commands.table_sources import chunks_of, parquet, requests_of, text_file

from contract.openai.lines import check_body, parse_line
from producer.input.options import BadOption
from producer.input.reader import InputUnreadable
from producer.input.source import Source, open_source
from producer.input.tables.frames import frame_source
from producer.input.tables.mapping import RowMapping

D = decimal.Decimal


def lines_of(name: str, pairs: dict[str, str]) -> list[Any]:
    return requests_of(open_source(name, pairs))


def told(source: Source) -> list[Any]:
    """Return each row's text, or the problem of one that is no request, in brackets."""
    return [r["prompt"] if isinstance(r, dict) else r[:1] for r in requests_of(source)]


def texts(column: pa.Array) -> list[Any]:
    return told(frame_source(pa.table({"c": column}), {"prompt": "{c}"}))


def fields(column: pa.Array) -> list[Any]:
    table = pa.table({"p": ["x"] * len(column), "c": column})
    source = frame_source(table, {"prompt": "p", "chat_template_kwargs": "c"})
    rows = [line for chunk in chunks_of(source) for _, line in chunk.lines]
    return [line.partition(b'"chat_template_kwargs":')[2][:-2].decode() for line in rows]


def storage(kind: Any, values: Any) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, values)


#: A value of a type that test_any_arrow_type.py does not draw, or not within others, and what is
#: written for it.
CELLS: list[tuple[pa.DataType, Any, Any]] = [
    (pa.float16(), 6e-8, 6e-8),
    (pa.timestamp("us"), dt.datetime(9999, 12, 31), "9999-12-31T00:00:00"),
    (pa.dictionary(pa.int8(), pa.string()), "a", "a"),
    (pa.json_(), '{"a": [null, 1]}', {"a": [None, 1]}),
    (pa.map_(pa.int64(), pa.float32()), [(5, -100.0)], {"5": -100}),
    (pa.list_view(pa.string()), ["a"], ["a"]),
]


def array(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """Return an array; the JSON type is made of its texts, at any depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))
    return pa.array(values, kind)


def values_of(column: pa.Array) -> list[Any]:
    """Return what requests have of a column."""
    table = pa.table({"prompt": ["x"] * len(column), "c": column})
    source = frame_source(table, {"prompt": "prompt", "chat_template_kwargs": "c"})
    return [line.get("chat_template_kwargs") for line in requests_of(source)]


@pytest.mark.parametrize(("kind", "value", "written"), CELLS, ids=str)
def test_each_type_is_written_as_by_hand_also_nested(
    kind: pa.DataType, value: Any, written: Any
) -> None:
    plain = array(kind, [value, None])
    assert values_of(plain) == [written, None]
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 2], pa.int32()), plain)
    assert values_of(lists) == [[written, None], []]
    struct_ = pa.StructArray.from_arrays([plain], ["k"])
    assert values_of(struct_) == [{} if written is None else {"k": written}, {}]


@pytest.mark.parametrize("year", [1000, 1816, 2300, 9999])
def test_a_date_of_spark_keeps_its_year(tmp_path: Path, year: int) -> None:
    dates = pa.array([dt.datetime(year, 12, 31)], pa.timestamp("us"))
    name = parquet(tmp_path / "t.parquet", {"at": dates}, use_deprecated_int96_timestamps=True)
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
        found = requests_of(frame_source(pa.table({"c": one}), {"prompt": "value {c}"}))
        assert [isinstance(line, dict) for line in found] == [True, False, True]
        assert found[1][1] == "c"


def test_a_zone_that_nobody_knows_costs_rows_and_not_the_file() -> None:
    column = pa.array([1], pa.timestamp("us", "Mars/Olympus"))
    source = frame_source(pa.table({"c": column}), {"prompt": "{c}"})
    (line,) = requests_of(source)
    assert line[1] == "c"
    assert "Mars/Olympus" in line[0]


def test_texts_of_numbers(tmp_path: Path) -> None:
    columns = {
        "f": pa.array([19.99, float("nan")], pa.float32()),
        "d": pa.array([decimal.Decimal("1E-7")] * 2, pa.decimal128(10, 7)),
        "y": pa.array([2020.0] * 2),
    }
    good, bad = requests_of(
        open_source(
            parquet(tmp_path / "t.parquet", columns), {"prompt": "{f} {d} {y}", "custom_id": "y"}
        )
    )
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
    name = parquet(tmp_path / "t.parquet", {"p": ["[x]"], "c": [text]})
    assert lines_of(name, {"prompt": "p", field: "c"}) == [{"prompt": "[x]", field: value}]


def test_a_list_of_inputs_in_a_text_cell(tmp_path: Path) -> None:
    name = parquet(tmp_path / "t.parquet", {"c": ['["a", "b"]', "a"]})
    assert [one["body"]["input"] for one in lines_of(name, {"input": "c"})] == [
        ["a", "b"],
        "a",
    ]


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


def test_false_in_a_union_is_a_value() -> None:
    kinds = pa.array([0, 1, 0], pa.int8())
    column = pa.UnionArray.from_sparse(
        kinds, [pa.array([False, None, None]), pa.array([1, 0, 2])], ["b", "i"]
    )
    assert texts(pa.ListArray.from_arrays([0, 3], column)) == ["[false,0,null]"]


STRUCT = pa.struct([("a", pa.float32()), ("b", pa.string())])
FLOATS = pa.list_(pa.float32(), 4)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (storage(pa.opaque(STRUCT, "t", "v"), pa.array([{"a": 19.99}], STRUCT)), '{"a":19.99}'),
        (storage(pa.fixed_shape_tensor(pa.float32(), [2, 2]), pa.array([[1.1, 2, 3, 4]], FLOATS)),
         "[1.1,2,3,4]"),
        (storage(pa.bool8(), pa.array([0], pa.int8())), "false"),
    ],
    ids=["opaque", "tensor", "bool8"],
)  # fmt: skip
def test_an_extension_type_is_what_it_stores(column: pa.Array, text: str) -> None:
    assert texts(column) == [text]
    assert texts(pa.ListArray.from_arrays([0, 1], column)) == [f"[{text}]"]


def test_a_period_is_no_number(tmp_path: Path) -> None:
    frame = pd.DataFrame({"c": pd.period_range("2024-01", periods=1, freq="M")})
    path = str(tmp_path / "p.parquet")
    frame.to_parquet(path)
    for source in (frame_source(frame, {"prompt": "{c}"}), open_source(path, {"prompt": "{c}"})):
        ((problem,),) = told(source)
        assert "period" in problem
        assert "astype(str)" in problem


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        (pa.decimal128(30, 3), [D("1234567890123456789.123")], "1234567890123456789.123"),
        (pa.decimal256(60, 2), [D("0.10")], "0.1"),
        (pa.decimal128(38, 0), [D(5)], "5"),
    ],
)
def test_a_decimal_keeps_its_digits(kind: pa.DataType, values: Any, text: str) -> None:
    column = pa.array([{"d": values[0]}], pa.struct([("d", kind)]))
    assert texts(column) == [f'{{"d":{text}}}'] == fields(column)


def test_an_integer_of_more_than_64_bits_is_the_rows_error() -> None:
    column = pa.array([{"d": D(10) ** 30}], pa.struct([("d", pa.decimal128(38, 0))]))
    assert "64" in texts(column)[0][0]
    column = storage(
        pa.json_(), pa.array(["[12345678901234567890123]", '["12345678901234567890123"]'])
    )
    (problem,), kept = texts(column)
    assert "64 bits" in problem
    assert kept == '["12345678901234567890123"]'


def test_durations_are_written_one_way() -> None:
    day = 86_400 * 10**9
    assert texts(pa.array([day + 1000, day + 1, 1], pa.duration("ns"))) == [
        "1 day, 0:00:00.000001", "1 day, 0:00:00.000000001", "0:00:00.000000001",
    ]  # fmt: skip
    assert texts(pa.array([[90_000, 1]], pa.list_(pa.duration("ms")))) == ["[90,0.001]"]
    assert fields(pa.array([90_000, 1], pa.duration("s"))) == ["90000", "1"]
    assert fields(pa.array([1], pa.duration("ns"))) == ["1e-9"]


def mapped(kind: pa.DataType, *pairs: tuple[Any, int]) -> Any:
    return texts(pa.array([pairs], pa.map_(kind, pa.int8())))[0]


def test_keys_of_a_map_are_as_they_are_written_elsewhere() -> None:
    assert mapped(pa.decimal128(10, 7), (D("0.0000001"), 1)) == '{"0.0000001":1}'
    assert mapped(pa.duration("s"), (90, 1)) == '{"90":1}'
    assert mapped(pa.date32(), (dt.date(2024, 1, 2), 1)) == '{"2024-01-02":1}'
    assert mapped(pa.bool_(), (True, 1)) == '{"true":1}'
    assert mapped(pa.float32(), (0.1, 1), (2.0, 3)) == '{"0.1":1,"2":3}'


def test_keys_that_would_be_lost_are_the_rows_error() -> None:
    assert "bytes" in mapped(pa.binary(), (b"k", 1))[0]
    assert "twice" in mapped(pa.string(), ("k", 1), ("k", 2))[0]


def test_a_struct_with_a_key_twice_is_the_rows_error() -> None:
    column = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["k", "k"])
    assert "twice" in texts(column)[0][0]
    assert "twice" in texts(pa.ListArray.from_arrays([0, 1], column))[0][0]


def test_two_columns_of_a_name_are_told(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["c", "c"])
    path = str(tmp_path / "c.arrow")
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    for make in (lambda: frame_source(table, {"prompt": "c"}),
                 lambda: open_source(path, {"prompt": "c"})):  # fmt: skip
        with pytest.raises((BadOption, InputUnreadable), match="two columns"):
            told(make())


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (pd.NA, None), (pd.NaT, None), (np.float32("nan"), None), (np.datetime64("NaT"), None),
        (float("nan"), None), (np.float32(19.99), "19.99"), (np.float16(0.1), "0.1"),
        (np.float64(16.0), "16"), (np.bool_(True), "true"), (np.int64(5), "5"),
        (np.array([1.5, 2]), "[1.5,2]"), (np.array(["a"]), '["a"]'), ((1, None), "[1,null]"),
        ({"a": pd.NA, "b": [pd.NaT, 2.0]}, '{"b":[null,2]}'), ({5: -100.0}, '{"5":-100}'),
        (pd.Timestamp("2024-05-01"), "2024-05-01T00:00:00"),
        (np.datetime64("2024-05-01T00:00:00"), "2024-05-01T00:00:00"),
        (Path("/x"), "/x"), (object(), ["cannot"]), ({1, 2}, ["cannot"]),
        (Colour.RED, "red"), ([float("inf")], ["is infinite"]), (pd.Interval(0, 1), ["cannot"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_python_rows_value_is_as_a_tables(value: Any, text: Any) -> None:
    """Rows as dicts, as `df.to_dict("records")` gives them."""
    line = orjson.loads(RowMapping({"prompt": "{x}"}).line_of_values({"x": value}))
    found = line["prompt"] if isinstance(line, dict) else [line[0]]
    expected = ["is empty"] if text is None else text
    if isinstance(expected, list):
        assert found[0].startswith(expected[0])
    else:
        assert found == expected
    line = orjson.loads(
        RowMapping({"prompt": "p", "user": "x"}).line_of_values({"p": "q", "x": value})
    )
    assert isinstance(line, list) == (isinstance(text, list))
    assert text is not None or "user" not in line


def test_a_list_as_python_writes_it_is_no_end(tmp_path: Path) -> None:
    path = text_file(tmp_path / "a.csv", "prompt,stop\nq,\"['a', 'b']\"\nq,['a' 'b']\nq,[a]\nq,[\n")
    source = open_source(path, {"prompt": "prompt", "stop": "stop"})
    first, second, *others = told(source)
    assert "JSON" in first[0]
    assert "JSON" in second[0]
    assert others == ["q", "q"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("p;x\nq;1\n", "looks like ';'"),
        ("p|x\nq|1\n", r"looks like '\|'"),
        ("p\tx\nq\t1\n", "looks like 'tab'"),
        ("sep=;\np;x\nq;1\n", "first line, sep=;"),
        ("sep=,\np,x\nq,1\n", "first line, sep=,"),
        ("p,x\nq,1\n".encode("utf-16-le"), "UTF-16"),
        ("p,x\nq,1\n".encode("utf-32"), "UTF-32"),
    ],
)
def test_another_form_of_csv_is_named(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = text_file(tmp_path / "a.csv", text)
    with pytest.raises((BadOption, InputUnreadable), match=words):
        open_source(path, {"prompt": "p"})
    if not words.startswith("UTF"):
        with pytest.raises(InputUnreadable, match=words) as raised:
            open_source(path, {})
        assert raised.value.remedy == "give_delimiter"


@pytest.mark.parametrize("delimiter", [";", "|", "tab", "\\t", ":"])
def test_a_delimiter_is_given(tmp_path: Path, delimiter: str) -> None:
    mark = "\t" if delimiter in ("tab", "\\t") else delimiter
    path = text_file(tmp_path / "a.csv", f'p{mark}n\n"a{mark}b, c"{mark}4\n')
    source = open_source(path, {"prompt": "p", "max_tokens": "n"}, delimiter=delimiter)
    assert requests_of(source) == [{"prompt": f"a{mark}b, c", "max_tokens": 4}]
    assert requests_of(source.reopen()) == [{"prompt": f"a{mark}b, c", "max_tokens": 4}]


@pytest.mark.parametrize("delimiter", [";;", '"', "\n"])
def test_a_wrong_delimiter_is_named(tmp_path: Path, delimiter: str) -> None:
    path = text_file(tmp_path / "a.csv", "p\nq\n")
    with pytest.raises(BadOption, match=r"^delimiter: .*give one character"):
        open_source(path, {}, delimiter=delimiter)
    with pytest.raises(InputUnreadable, match="looks like ','"):
        open_source(text_file(tmp_path / "b.csv", "p,n\nq,1\n"), {}, delimiter=";")
    lines = text_file(tmp_path / "a.jsonl", '{"prompt": "x"}\n')
    with pytest.raises(BadOption, match=r"^delimiter: only CSV"):
        open_source(lines, {}, delimiter=";")


@pytest.mark.parametrize(
    ("name", "text", "delimiter", "told"),
    [("a.csv", "sep=;\np;n\n", "", ";"), ("a.csv", "sep=;\np;n\n", ";", ";"),
     ("a.tsv", "sep=\t\np\tn\n", "", "tab")],
)  # fmt: skip
def test_excels_first_line_names_the_delimiter(
    tmp_path: Path, name: str, text: str, delimiter: str, told: str
) -> None:
    with pytest.raises(InputUnreadable, match=r"remove the file's first line, sep=") as raised:
        open_source(text_file(tmp_path / name, text), {}, delimiter=delimiter)
    assert raised.value.facts == {"delimiter": told}


def test_a_column_with_a_semicolon_in_its_name_is_one(tmp_path: Path) -> None:
    path = text_file(tmp_path / "a.csv", "a;b\nq\n")
    assert requests_of(open_source(path, {"prompt": "a;b"})) == [{"prompt": "q"}]


def test_a_text_is_a_number_only_where_a_field_takes_one(tmp_path: Path) -> None:
    """A text is neither changed nor lost where only lists and objects are taken."""
    columns = {"prompt": ["q"] * 5, "c": ["0", "true", '"a"', "null", '{"a": 1}']}
    pairs = {"prompt": "prompt", "chat_template_kwargs": "c"}
    rows = requests_of(open_source(parquet(tmp_path / "in.parquet", columns), pairs))
    kept = [row.get("chat_template_kwargs") for row in rows]
    assert kept == ["0", "true", '"a"', None, {"a": 1}]
