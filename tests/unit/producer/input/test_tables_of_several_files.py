"""Folders of data sets, patterns and frames of a program as one table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.commands.table_sources import chunks_of, parquet, requests_of, text_file

from producer import Client
from producer.input import source as sources
from producer.input.options import BadOption
from producer.input.reader import InputUnreadable
from producer.input.source import open_source
from producer.input.tables.frames import frame_source, is_frame
from producer.input.tables.mapping import RowMapping

PROMPT = {"prompt": "text"}


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
    with pytest.raises(BadOption, match=r"several splits: give one of them \('.*test-\*.parquet'"):
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
    with pytest.raises(BadOption, match="several splits") as error:
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
    with pytest.raises(InputUnreadable, match="no file matches it"):
        open_source(str(tmp_path / "*.parquet"))
    text_file(tmp_path / "in.jsonl", "{}")
    with pytest.raises(BadOption, match=r"not a table; .*leave the mapping out"):
        open_source(str(tmp_path / "in.jsonl"), PROMPT)
    with pytest.raises(BadOption, match="not tables of one kind"):
        open_source(str(tmp_path / "*.jsonl"))
    parquet(tmp_path / "empty.parquet", {})
    with pytest.raises(BadOption, match="the table has no columns"):
        open_source(str(tmp_path / "empty.parquet"))


# -- parts of a table and their order ------------------------------------------

SPARK = "part-{:05}-7f0c2c1a-52f0-4a5d-9f43-2f1f0b7f9d11-c000.snappy.parquet"
DASK = "part.{}.parquet"
RAY = "0_{:06}_000000.parquet"
DUCKDB = "data_{}.parquet"


def written(folder: Path, names: list[str]) -> None:
    """Write a file of one row for each name; its prompt is the file's number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        pq.write_table(pa.table({"prompt": [str(number)]}), folder / name)


def prompts(name: str) -> list[str]:
    return [request["prompt"] for request in requests_of(open_source(name))]


SNOWFLAKE = "data_01b2c3d4-0000-0000-0000-00010002{0:04}_0{0}_0_0.snappy.parquet"
POLARS = "{:08}.parquet"
FORMS = [SPARK, DASK, RAY, DUCKDB, SNOWFLAKE, POLARS, "part-{}.parquet", "{:012}.parquet"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("folder", ["out", "br[1]", "a b=c?"])
def test_the_folder_of_a_writer_is_one_table_in_the_order_of_its_numbers(
    tmp_path: Path, form: str, folder: str
) -> None:
    names = [form.format(number) for number in range(12)]
    written(tmp_path / folder, names)
    aside = ["_SUCCESS", "._SUCCESS.crc", f".{names[0]}.crc", "_metadata", "_common_metadata"]
    for name in aside:
        (tmp_path / folder / name).write_bytes(b"PAR1 or not")
    written(tmp_path / folder / "_temporary" / "0", [names[0]])
    for name in (folder, f"{folder}/", f"{folder}/*{Path(names[0]).suffix}"):
        expected = [str(number) for number in range(12)]
        assert prompts(f"{tmp_path}/{name}") == expected


@pytest.mark.parametrize(
    "form", ["{:06}_0", "20260101_101112_00042_abcde_{:08}-1a2b-4c3d-8e4f-5a6b7c8d9e0f"]
)
def test_parquet_files_without_an_ending_are_those_of_hive_and_athena(
    tmp_path: Path, form: str
) -> None:
    written(tmp_path / "t" / "year=2026", [form.format(number) for number in range(12)])
    (tmp_path / "t" / "year=2026" / "000099_0").touch()  # an empty part
    (tmp_path / "t" / "year=2026" / "README.md").write_text("no table")
    assert prompts(f"{tmp_path}/t") == [str(number) for number in range(12)]


def test_folders_of_hives_form_are_columns(tmp_path: Path) -> None:
    for key in ("day=10", "day=2", "day=__HIVE_DEFAULT_PARTITION__", "day=3%2F4"):
        written(tmp_path / "hive" / "year=2026" / key, ["data_1.parquet", "data_0.parquet"])
    pairs = {"prompt": "prompt", "custom_id": "{year}/{day}/{prompt}"}
    for name in ("hive", "hive/year=2026", "hive/**/*.parquet", "hive/*/*/*.parquet"):
        source = open_source(f"{tmp_path}/{name}", pairs)
        assert [(r["custom_id"], r["prompt"]) for r in requests_of_good(source)] == [
            (f"2026/{day}/{n}", n) for day in ("2", "3/4", "10") for n in ("1", "0")
        ]
    one = open_source(f"{tmp_path}/hive/year=2026/day=2/*.parquet", pairs)
    assert [r["custom_id"] for r in requests_of_good(one)] == ["2026/2/1", "2026/2/0"]
    assert prompts(f"{tmp_path}/hive") == ["1", "0"] * 4
    assert prompts(f"{tmp_path}/hive/**/*_0.parquet") == ["1"] * 4


def requests_of_good(source: sources.Source) -> list[dict[str, Any]]:
    """Return the requests; rows without a day are bad rows."""
    return [found for found in requests_of(source) if isinstance(found, dict)]


def test_a_column_of_the_file_precedes_that_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "day=2"
    folder.mkdir()
    parquet(folder / "0.parquet", {"prompt": ["a"], "day": [2]})
    (request,) = requests_of(open_source(str(tmp_path), {"prompt": "{day}", "max_tokens": "day"}))
    assert request == {"prompt": "2", "max_tokens": 2}
    text_file(tmp_path / "day=2" / "1.parquet", b"")
    with pytest.raises(InputUnreadable, match=r"1\.parquet"):
        prompts(str(tmp_path))


def test_folders_of_csv_and_their_keys(tmp_path: Path) -> None:
    for number in (10, 9):
        (tmp_path / f"n={number}").mkdir()
        text_file(tmp_path / f"n={number}" / "0.csv", f"prompt\nrow {number}\n")
    source = open_source(str(tmp_path), {"prompt": "prompt", "max_tokens": "n"})
    assert requests_of(source) == [
        {"prompt": "row 9", "max_tokens": 9}, {"prompt": "row 10", "max_tokens": 10},
    ]  # fmt: skip
    before = source.fingerprint()
    (tmp_path / "n=10").rename(tmp_path / "n=11")
    again = open_source(str(tmp_path), {"prompt": "prompt", "max_tokens": "n"})
    assert again.fingerprint() != before


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["fold_1-00000-of-00001.parquet", "fold_2-00000-of-00001.parquet"], "several splits"),
        (["run1/part.0.parquet", "run2/part.0.parquet"], "several splits"),
        (["reviews.parquet", "labels.parquet"], "several splits"),
        (["a.parquet", "b.csv"], "files of 2 kinds"),
    ],
)
def test_a_folder_of_several_tables_names_their_patterns(
    tmp_path: Path, names: list[str], words: str
) -> None:
    for name in names:
        written((tmp_path / name).parent, [Path(name).name])
    with pytest.raises(BadOption, match=words) as raised:
        open_source(str(tmp_path))
    assert f"'{tmp_path}/" in raised.value.message


@pytest.mark.parametrize(
    ("log", "kind"),
    [("_delta_log/0.json", "Delta"), ("metadata/v1.metadata.json", "Iceberg"),
     (".hoodie/x", "Hudi")],
)  # fmt: skip
def test_a_table_whose_log_deletes_rows_is_refused(tmp_path: Path, log: str, kind: str) -> None:
    written(tmp_path, ["part-0.parquet"])
    (tmp_path / log).parent.mkdir()
    text_file(tmp_path / log, "{}")
    with pytest.raises(InputUnreadable, match=f"a table of {kind}"):
        open_source(str(tmp_path))


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
    with pytest.raises(InputUnreadable, match="no file matches it"):
        open_source("e/*.parquet")


@pytest.mark.parametrize("folder", ["br[1]", "spark", "a%20b"])
def test_keys_of_a_bucket(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Brackets in a key stand for themselves; numbers count."""
    keys = [f"s3://b/{folder}/{DASK.format(number)}" for number in sorted(map(str, range(12)))]
    monkeypatch.setattr(
        sources, "urls_under", lambda _: iter([*keys, f"s3://b/{folder}/", f"s3://b/{folder}/x/"])
    )
    opened: list[list[Any]] = []
    monkeypatch.setattr(sources, "place_of", lambda name: name)
    monkeypatch.setattr(
        sources, "TableSource", lambda _, parts, *__: opened.append([part.place for part in parts])
    )
    open_source(f"s3://b/{folder}/part.*.parquet")
    open_source(f"s3://b/{folder}/")
    assert opened == [[f"s3://b/{folder}/{DASK.format(number)}" for number in range(12)]] * 2


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
        assert requests_of(source.reopen()) == [{"prompt": "a1"}, {"prompt": "b2"}]


def test_rows_that_are_dicts_are_mapped_without_knowing_the_columns():
    mapping = RowMapping({"prompt": "text", "custom_id": "id"})
    assert orjson.loads(mapping.line({"text": "a", "id": 7})) == {"custom_id": "7", "prompt": "a"}
    assert b"is empty" in mapping.line({"id": 7})
    assert b"must be a dict" in mapping.line(["a"])


def test_a_data_set_says_which_columns_it_has():
    class Rows(list[dict[str, str]]):
        column_names = ["text"]  # noqa: RUF012

    with pytest.raises(BadOption, match="there is no column 'txt'; did you mean text"):
        Client("redis://127.0.0.1:1/0").submit(Rows(), columns={"prompt": "txt"})
