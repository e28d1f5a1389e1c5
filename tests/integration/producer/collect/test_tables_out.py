"""A table in gives a table out: all rows, in order, with the columns that were kept."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from typing import Any

import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.commands.bucket_objects import rows as rows_in
from kit.commands.support import producer_command, producer_env, run_all, run_producer
from kit.stacks.celery_side import simulated

from contract.redis.batches import BatchStore

MAP = ("--map", "custom_id=id", "--map", "messages.system=You are a librarian.")
MAP += ("--map", "messages.user={text}", "--map", "max_tokens=limit")


def table(path: Path, count: int) -> pa.Table:
    columns = {
        "id": list(range(count)),
        "text": [None if n == 3 else f"text {n}" for n in range(count)],
        "gold": [["good", None, "bad"][n % 3] for n in range(count)],
        "limit": [-1 if n == 7 else 4 for n in range(count)],
    }
    whole = pa.table(columns)
    pq.write_table(whole, path)
    return whole


def check_rows(found: pa.Table, given: pa.Table) -> None:
    """Compare an output with its input; rows 3 and 7 of the input are wrong."""
    assert found["id"].combine_chunks() == given["id"].combine_chunks()
    assert found["custom_id"].combine_chunks() == given["id"].combine_chunks()
    assert found["gold"].combine_chunks() == given["gold"].combine_chunks()
    assert found["line"].to_pylist() == list(range(1, len(given) + 1))
    failed = [row for row in found.to_pylist() if row["status"] == "failed"]
    assert [(row["id"], row["error_code"]) for row in failed] == [
        (3, "invalid_request"), (7, "invalid_request")
    ]  # fmt: skip
    assert "row 4, column text: is empty" in failed[0]["error_message"]
    assert found["text"].null_count == found["response"].null_count == 2


def test_submit_and_a_later_collection_elsewhere_give_the_same_table(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    given = table(tmp_path / "in.parquet", 700)
    with simulated(redis_url, tmp_path / "worker.log"):
        args = ("submit", tmp_path / "in.parquet", *MAP, "--keep", "id,gold", "--batch-id", "b1")
        done = run_producer(*args, "-o", tmp_path / "out.parquet", redis_url=redis_url)
    assert done.returncode == 1, done.stderr
    check_rows(pq.read_table(tmp_path / "out.parquet"), given)
    assert not list(tmp_path.glob("*errors*"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = producer_command("results", "b1", "-o", "out.parquet", "--errors", "bad.parquet")
    subprocess.run(command, env=producer_env(redis_url), cwd=elsewhere, check=False)
    there = pq.read_table(elsewhere / "out.parquet")
    check_rows(there, given)
    assert pq.read_table(elsewhere / "bad.parquet")["id"].to_pylist() == [3, 7]


@pytest.mark.parametrize("order", ["input", "prefix"])
@pytest.mark.parametrize("out", ["out.parquet", "s3://warmq/out.parquet"])
def test_a_run_gives_the_table(redis_url: str, bucket: Any, tmp_path: Path, out: str, order: str):
    given = table(tmp_path / "in.parquet", 1700)
    args = ("run", "in.parquet", out, *MAP, "--keep", "id,gold", "--order", order)
    command = producer_command(*args, "--window", "600", "--json")
    with simulated(redis_url, tmp_path / "worker.log"):
        done = subprocess.run(
            command, env=producer_env(redis_url), cwd=tmp_path, capture_output=True, check=False
        )
    assert done.returncode == 1, done.stderr
    assert orjson.loads(done.stdout)["errors_file"] is None
    if out.startswith("s3:"):
        data = bytes(obstore.get(bucket, "out.parquet").bytes())
        assert len(rows_in(data)) == 1700
        (tmp_path / "out.parquet").write_bytes(data)
    check_rows(pq.read_table(tmp_path / "out.parquet"), given)
    assert not list(tmp_path.glob("*errors*"))


def test_a_run_into_lines_has_the_kept_columns(redis_url: str, tmp_path: Path):
    table(tmp_path / "in.parquet", 10)
    args = ("run", tmp_path / "in.parquet", tmp_path / "out.jsonl", *MAP, "--keep", "id")
    with simulated(redis_url, tmp_path / "worker.log"):
        assert run_producer(*args, redis_url=redis_url).returncode == 1
        assert "was complete already" in run_producer(*args, redis_url=redis_url).stderr
    lines = map(orjson.loads, (tmp_path / "out.jsonl").read_bytes().splitlines())
    assert [line["kept"] for line in lines] == [{"id": n} for n in range(10) if n not in (3, 7)]


def test_csv_in_csv_out(redis_url: str, store: BatchStore, tmp_path: Path):
    (tmp_path / "in.csv").write_text('id,text,note\n01,"a, b",x\n02,,y\n', encoding="utf-8")
    args = ("submit", tmp_path / "in.csv", "--map", "prompt=text", "--map", "custom_id=id")
    done = run_producer(*args, "--keep", "all", "--batch-id", "b1", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    run_all(store)
    done = run_producer("results", "b1", "-o", tmp_path / "out.csv", redis_url=redis_url)
    assert "column text is kept as input_text, because text is the answer" in done.stderr
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [(row["id"], row["input_text"], row["note"], row["status"]) for row in found] == [
        ("01", "a, b", "x", "completed"), ("02", "", "y", "failed")
    ]  # fmt: skip
    assert found[0]["text"]
    again = run_producer("results", "b1", "-o", tmp_path / "out.csv", redis_url=redis_url)
    assert again.returncode == 1  # a file that is unchanged is replaced
    run = ("run", tmp_path / "in.csv", tmp_path / "run.tsv", *args[2:], "--keep", "note")
    with simulated(redis_url, tmp_path / "worker.log"):
        assert run_producer(*run, redis_url=redis_url).returncode == 1
    assert (tmp_path / "run.tsv").read_text(encoding="utf-8").startswith("note\tcustom_id\tline\t")


def test_the_schema_of_all_requests_gives_columns(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    (tmp_path / "in.csv").write_text("id,prompt\n1,a\n", encoding="utf-8")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"label": {"type": "string"}}}')
    args = ("submit", tmp_path / "in.csv", "--schema", schema)
    done = run_producer(*args, "--batch-id", "b1", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    run_all(store)
    run_producer("results", "b1", "-o", tmp_path / "out.csv", redis_url=redis_url)
    header = (tmp_path / "out.csv").read_text(encoding="utf-8").partition("\n")[0]
    assert header.startswith("custom_id,line,status,label,text,")
