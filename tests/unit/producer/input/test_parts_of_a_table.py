"""Folders and patterns: which files a name stands for, and in which order they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from producer.input import source as sources
from producer.input.options import BadOption
from producer.input.reader import InputUnreadable
from producer.input.source import open_source

SPARK = "part-{:05}-7f0c2c1a-52f0-4a5d-9f43-2f1f0b7f9d11-c000.snappy.parquet"
DASK = "part.{}.parquet"
RAY = "0_{:06}_000000.parquet"
DUCKDB = "data_{}.parquet"
SEED = "00" * 32


def written(folder: Path, names: list[str]) -> None:
    """Write a file of one row for each name; its prompt is the file's number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        pq.write_table(pa.table({"prompt": [str(number)]}), folder / name)


def prompts(name: str) -> list[str]:
    source = open_source(name)
    lines = [line for chunk in source.chunks(SEED, 10**6) for _, line in chunk.lines]
    return [line.decode().split('"')[3] for line in lines]


@pytest.mark.parametrize("form", [SPARK, DASK, RAY, DUCKDB])
def test_a_folder_of_parts_names_the_pattern_that_takes_all_in_order(
    tmp_path: Path, form: str
) -> None:
    folder = tmp_path / "out"
    written(folder, [form.format(number) for number in range(12)])
    (folder / "_SUCCESS").touch()
    with pytest.raises(BadOption) as raised:
        open_source(str(folder))
    assert f"'{folder}/*.parquet' for all of them as one table" in raised.value.message
    assert "and 9 more" in raised.value.message
    assert raised.value.message.count(".parquet'") == 4
    assert prompts(f"{folder}/*.parquet") == [str(number) for number in range(12)]


def test_a_folder_of_partitions_names_its_pattern(tmp_path: Path) -> None:
    for day in ("day=2", "day=10"):
        written(tmp_path / "hive" / day, ["a-0.parquet", "b-1.parquet"])
    name = f"{tmp_path}/hive"
    with pytest.raises(BadOption, match=r"or '[^']*/hive/\*\*/\*\.parquet'"):
        open_source(name)
    assert prompts(f"{name}/**/*.parquet") == ["0", "1", "0", "1"]
    assert prompts(f"{name}/day=*/a-*.parquet") == ["0", "0"]


@pytest.mark.parametrize("folder", ["br[1]", "what?", "a b", "[x"])
def test_only_stars_mean_something_in_a_pattern(tmp_path: Path, folder: str) -> None:
    written(tmp_path / folder, ["part.2.parquet", "part.10.parquet"])
    written(tmp_path / "br1", ["part.3.parquet"])
    assert prompts(f"{tmp_path}/{folder}/part.*.parquet") == ["0", "1"]


def test_a_relative_pattern_and_hidden_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "d", ["a1.parquet", ".a2.parquet"])
    monkeypatch.chdir(tmp_path)
    assert prompts("d/*.parquet") == prompts("./d/a*.parquet") == prompts("*/*.parquet") == ["0"]
    with pytest.raises(InputUnreadable, match="no file is named like that"):
        open_source("e/*.parquet")


@pytest.mark.parametrize("folder", ["br[1]", "spark", "a%20b"])
def test_keys_of_a_bucket(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Brackets in a key stand for themselves; numbers count."""
    keys = [f"s3://b/{folder}/{DASK.format(number)}" for number in sorted(map(str, range(12)))]
    monkeypatch.setattr(sources, "keys_under", lambda _: iter(keys))
    opened: list[list[Any]] = []
    monkeypatch.setattr(sources, "place_of", lambda name: name)
    monkeypatch.setattr(sources, "TableSource", lambda _, places, __: opened.append(places))
    open_source(f"s3://b/{folder}/part.*.parquet")
    assert opened == [[f"s3://b/{folder}/{DASK.format(number)}" for number in range(12)]]
    with pytest.raises(BadOption) as raised:
        open_source(f"s3://b/{folder}/")
    assert f"'s3://b/{folder}/*.parquet' for all of them as one table" in raised.value.message
