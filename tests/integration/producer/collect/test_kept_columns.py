"""Kept columns of a table are in the results, on any machine and in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.commands import json_output
from kit.commands.support import run_all, run_producer

from contract.redis.batches import BatchStore
from contract.redis.keys import batch_key
from producer import Client

MAP = ("--map", "prompt=text", "--map", "custom_id=id")


def table(path: Path, count: int) -> Path:
    columns = {
        "id": list(range(count)),
        "text": [f"question {n % 3} with the same beginning" for n in range(count)],
        "gold": [["good", None, "bad"][n % 3] for n in range(count)],
        "limit": [-1 if n == 7 else 4 for n in range(count)],
    }
    pq.write_table(pa.table(columns), path)
    return path


def kept_in(folder: Path) -> dict[int, Any]:
    lines = [line for path in folder.glob("out*.jsonl") for line in path.read_bytes().splitlines()]
    found = [orjson.loads(line) for line in lines]
    for line in found:
        json_output.check("result_line", line)
    return {(line["error"] or line["warmq"])["line"]: line["kept"] for line in found}


@pytest.mark.parametrize("order", ["input", "prefix"])
@pytest.mark.parametrize("collected", ["input", "completion"])
@pytest.mark.parametrize("dedupe", [(), ("--dedupe", "--set", "temperature=0")])
def test_results_have_the_kept_columns(
    redis_url: str, store: BatchStore, tmp_path: Path, order: str, collected: str,
    dedupe: tuple[str, ...],
):  # fmt: skip
    name = table(tmp_path / "in.parquet", 1300)
    args = ("submit", name, *MAP, "--map", "max_tokens=limit", "--keep", "id,gold", *dedupe)
    args += ("--order", order, "--batch-id", "b1")
    done = run_producer(*args, redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert "was submitted already" in run_producer(*args, redis_url=redis_url).stderr
    name.unlink()  # as on another machine
    run_all(store)
    out = tmp_path / "out.jsonl"
    done = run_producer("results", "b1", "-o", out, "--order", collected, redis_url=redis_url)
    assert done.returncode == 1, done.stderr
    gold = ["good", None, "bad"]
    assert kept_in(tmp_path) == {n + 1: {"id": n, "gold": gold[n % 3]} for n in range(1300)}
    assert store._client.memory_usage(batch_key("b1", "columns")) < 13_000
    assert run_producer("delete", "b1", redis_url=redis_url).returncode == 0
    assert not store._client.keys("warmq:batch:b1*")


def test_other_kept_columns_are_other_options(redis_url: str, store: BatchStore, tmp_path: Path):
    name = table(tmp_path / "in.parquet", 3)
    args = ("submit", name, *MAP, "--batch-id", "b1")
    assert run_producer(*args, "--keep", "gold", redis_url=redis_url).returncode == 0
    again = run_producer(*args, "--keep", "all", redis_url=redis_url)
    assert again.returncode == 2
    assert "was submitted with other options" in again.stderr


def test_columns_that_are_not_used_are_said_once(redis_url: str, store: BatchStore, tmp_path: Path):
    name = table(tmp_path / "in.parquet", 3)
    done = run_producer("submit", name, *MAP, redis_url=redis_url)
    assert done.stderr.count("columns not used: gold, limit; --keep copies them to OUT") == 1
    done = run_producer("plan", name, *MAP, "--keep", "all", redis_url=redis_url)
    assert "not used" not in done.stderr
    wrong = run_producer("submit", name, *MAP, "--keep", "golden", redis_url=redis_url)
    assert wrong.returncode == 2
    assert "producer: --keep: there is no column 'golden'; did you mean gold?" in wrong.stderr


def test_the_client_keeps_columns(redis_url: str, store: BatchStore, tmp_path: Path):
    rows = [{"text": "a", "gold": 1}, {"gold": 2}]
    with Client(redis_url) as client:
        batch = client.submit(rows, columns={"prompt": "text"}, keep=["gold"])
        run_all(store)
        assert [(r.ok, r.kept) for r in batch.results("input")] == [
            (True, {"gold": 1}), (False, {"gold": 2})
        ]  # fmt: skip
        with pytest.warns(UserWarning, match="columns not used: gold; keep them by keep="):
            client.submit(pa.table({"prompt": ["a"], "gold": [1]}))
        batch = client.submit([{"prompt": "a"}])
        run_all(store)
        assert [r.kept for r in batch] == [{}]
