"""Any Arrow type, at any depth: a cell is what is written by hand as JSON, or its row's error.

The rule of docs/reference/tables.md is written down again here, over Python's values: whoever
changes one must change the other.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import struct
import uuid
from functools import partial
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from producer.input.tables.frames import frame_source

SEED = "00" * 32
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
ZONES = (None, "UTC", "Asia/Seoul", "+05:30")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
EPOCH = dt.datetime(1970, 1, 1)
#: An Arrow type, values of it as its storage has them, and what JSON has for such a value.
Case = tuple[pa.DataType, SearchStrategy[Any], Any]


def same(value: Any) -> Any:
    return value


def shortest(width: int) -> Any:
    """Return what writes a float of so many bits: the shortest number that is read as the same."""

    def written(value: float) -> Any:
        if math.isnan(value):
            return None
        if value.is_integer() and abs(value) < 2**53:
            return int(value)
        code = {16: "e", 32: "f", 64: "d"}[width]
        for digits in range(1, 18):
            short = float(f"{value:.{digits}g}")
            try:
                if struct.pack(code, short) == struct.pack(code, value):
                    return short
            except OverflowError:
                continue
        raise AssertionError(value)

    return written


def iso(unit: str, zone: str | None) -> Any:
    """Return what writes a moment: ISO 8601, with nine digits where it has nanoseconds."""

    def written(value: int) -> str:
        nanoseconds = value * UNITS[unit]
        moment = EPOCH + dt.timedelta(microseconds=nanoseconds // 1000)
        if zone is not None:
            kind = pa.timestamp("us", zone)
            moment = pa.scalar(nanoseconds // 1000, pa.int64()).cast(kind).as_py()
        text, rest = moment.isoformat(), nanoseconds % 1000
        if rest:
            text = moment.isoformat(timespec="microseconds")
            text = f"{text[:26]}{rest:03}{text[26:]}"
        return text

    return written


def clock(unit: str) -> Any:
    def written(value: int) -> str:
        moment = (EPOCH + dt.timedelta(microseconds=value * UNITS[unit] // 1000)).time()
        rest = value * UNITS[unit] % 1000
        return (
            f"{moment.isoformat(timespec='microseconds')}{rest:03}" if rest else moment.isoformat()
        )

    return written


def seconds(unit: str) -> Any:
    return lambda value: number(decimal.Decimal(value * UNITS[unit]).scaleb(-9))


def number(value: decimal.Decimal) -> Any:
    return int(value) if value == value.to_integral_value() else float(value)


def floats(width: int) -> SearchStrategy[float]:
    return st.floats(width=width, allow_infinity=False)  # type: ignore[arg-type]


def ints(bits: int, signed: bool) -> SearchStrategy[int]:
    return (
        st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if signed
        else st.integers(0, 2**bits - 1)
    )


def moments(unit: str) -> SearchStrategy[int]:
    """Return moments of the years 1700 to 2200, which all units have."""
    per_s = 10**9 // UNITS[unit]
    return st.integers(-8_500_000_000 * per_s, 7_200_000_000 * per_s)


PLAIN: list[Case] = [
    *((kind, TEXTS, same) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    (pa.bool_(), st.booleans(), same),
    (pa.null(), st.none(), same),
    *((getattr(pa, f"int{n}")(), ints(n, True), same) for n in (8, 16, 32, 64)),
    *((getattr(pa, f"uint{n}")(), ints(n, False), same) for n in (8, 16, 32, 64)),
    *((getattr(pa, f"float{n}")(), floats(n), shortest(n)) for n in (16, 32, 64)),
    *((kind, st.decimals(-999, 999, places=2), number)
      for kind in (pa.decimal32(7, 2), pa.decimal64(9, 2), pa.decimal128(12, 2),
                   pa.decimal256(40, 2))),
    *((kind, st.dates(), dt.date.isoformat) for kind in (pa.date32(), pa.date64())),
    *((pa.timestamp(unit, zone), moments(unit), iso(unit, zone))
      for unit in UNITS for zone in ZONES),
    *((pa.duration(unit), st.integers(-10**15, 10**15), seconds(unit)) for unit in ("us", "ns")),
    *((pa.duration(unit), st.integers(-10**9, 10**9), seconds(unit)) for unit in ("s", "ms")),
    *((kind, st.integers(0, 86_399 * (10**9 // UNITS[kind.unit])), clock(kind.unit))
      for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))),
]  # fmt: skip
JSON = st.recursive(
    st.none() | TEXTS | st.integers(-9, 9),
    lambda one: st.lists(one, max_size=2) | st.dictionaries(TEXTS, one, max_size=2),
)
#: pyarrow makes arrays of them of Python's values only where they are not within others.
EXTENSIONS: list[Case] = [
    (pa.uuid(), st.uuids().map(lambda one: one.bytes), lambda raw: str(uuid.UUID(bytes=raw))),
    (pa.json_(), JSON.map(lambda one: orjson.dumps(one).decode()), orjson.loads),
]


def nullable(case: Case) -> Case:
    kind, values, written = case
    return kind, st.none() | values, lambda value: None if value is None else written(value)


def lists(case: Case) -> SearchStrategy[Case]:
    """Return lists of a type, in each of Arrow's forms."""
    kind, values, written = nullable(case)

    def made(form: Any) -> Case:
        few = st.lists(values, min_size=2, max_size=2)
        return form(kind), few, lambda value: [written(one) for one in value]

    forms = [
        pa.list_,
        pa.large_list,
        pa.list_view,
        pa.large_list_view,
        partial(pa.list_, list_size=2),
    ]
    return st.sampled_from(forms).map(made)


def structs(cases: list[Case]) -> Case:
    """Return structs: keys without a value are left out."""
    parts = {f"k{n}": nullable(case) for n, case in enumerate(cases)}
    kind = pa.struct([(name, part[0]) for name, part in parts.items()])
    values = st.fixed_dictionaries({name: part[1] for name, part in parts.items()})

    def written(value: dict[str, Any]) -> dict[str, Any]:
        found = {name: parts[name][2](one) for name, one in value.items()}
        return {name: one for name, one in found.items() if one is not None}

    return kind, values, written


def maps(case: Case) -> Case:
    kind, values, written = nullable(case)
    pairs = st.dictionaries(TEXTS, values, max_size=2).map(lambda one: list(one.items()))
    return pa.map_(pa.string(), kind), pairs, lambda value: {k: written(v) for k, v in value}


def cases() -> SearchStrategy[Case]:
    return st.recursive(
        st.sampled_from(PLAIN),
        lambda inner: (
            inner.flatmap(lists)
            | inner.map(maps)
            | st.lists(inner, min_size=1, max_size=2).map(structs)
        ),
        max_leaves=3,
    )


def written_of(column: pa.Array) -> list[Any]:
    """Return what the requests of a column have; the problem of a row that is none."""
    table = pa.table({"prompt": ["x"] * len(column), "c": column})
    source = frame_source(table, {"prompt": "prompt", "chat_template_kwargs": "c"})
    found = [orjson.loads(line) for chunk in source.chunks(SEED, 10**7) for _, line in chunk.lines]
    return [one if isinstance(one, list) else one.get("chat_template_kwargs") for one in found]


def holds(case: Case, values: list[Any]) -> None:
    kind, _, written = nullable(case)
    assert written_of(pa.array(values, kind)) == [written(value) for value in values]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_cell_is_what_is_written_by_hand(data: Any) -> None:
    case = data.draw(cases() | st.sampled_from(EXTENSIONS))
    holds(case, data.draw(st.lists(nullable(case)[1], min_size=1, max_size=4)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_repeated_cell_is_the_cell(data: Any) -> None:
    """Dictionaries and runs say less often what the same column says in full."""
    kind, values, _ = nullable(data.draw(st.sampled_from(PLAIN)))
    column = pa.array(data.draw(st.lists(values, min_size=1, max_size=4)), kind)
    expected = written_of(column)
    for encode in (pc.run_end_encode, pc.dictionary_encode):
        try:
            encoded = encode(column)
        except pa.ArrowNotImplementedError:  # not of every type
            continue
        assert written_of(encoded) == expected


BINARY = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1)]


@pytest.mark.parametrize("kind", BINARY, ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_bytes_are_the_rows_error(kind: pa.DataType, nested: bool) -> None:
    column = pa.array([None, b"a"], kind)
    if nested:
        column = pa.StructArray.from_arrays([column], ["k"])
    good, (problem, column_name, _) = written_of(column)
    assert good == ({} if nested else None)
    assert column_name == "c"
    assert "bytes" in problem


OTHERS = [
    pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
    pa.array([math.inf]),
    pa.array([[math.inf]]),
    pa.array([{"k": -math.inf}], pa.struct({"k": pa.float32()})),
]  # fmt: skip


@pytest.mark.parametrize("column", OTHERS, ids=lambda one: str(one.type))
def test_what_json_does_not_have_is_the_rows_error(column: pa.Array) -> None:
    ((problem, name, _),) = written_of(column)
    assert name == "c"
    assert problem


def test_a_value_of_a_union_is_that_of_its_type() -> None:
    kinds, offsets = pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32())
    sparse, dense = [pa.array(["a", "b"]), pa.array([1, 2])], [pa.array(["a"]), pa.array([2])]
    assert written_of(pa.UnionArray.from_sparse(kinds, sparse)) == ["a", 2]
    assert written_of(pa.UnionArray.from_dense(kinds, offsets, dense)) == ["a", 2]
