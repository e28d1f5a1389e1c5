"""`producer submit`, `run` and `plan` with tables do what they do with files of lines."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.commands.support import (
    producer_command,
    producer_env,
    queued,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.stacks.celery_side import simulated
from pyarrow import csv

from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer import Client

MAP = ("--map", "prompt=Say: {text}", "--map", "custom_id=id")


def table(path: Path, count: int, **more: Any) -> Path:
    columns = {
        "id": [f"r{n}" for n in range(count)],
        "text": [f"question {n % 7} of the same beginning {n}" for n in range(count)],
    }
    pq.write_table(pa.table(columns | more), path)
    return path


def lines(path: Path, count: int) -> Path:
    """Write the file of lines that says the same as the table."""
    return write_lines(
        path,
        (
            {"custom_id": f"r{n}", "prompt": f"Say: question {n % 7} of the same beginning {n}"}
            for n in range(count)
        ),
    )


def results(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_the_rows_of_a_table_are_queued_as_the_lines_of_a_file_are(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    whole = table(tmp_path / "in.parquet", 1200)
    done = run_producer("submit", whole, *MAP, "--batch-id", "b1", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert "1200 requests queued" in done.stderr
    of_table = [message["headers"]["warmq"]["custom_id"] for message in queued(store)]
    assert of_table == [f"r{n}" for n in range(1200)]
    again = run_producer("submit", whole, *MAP, "--batch-id", "b1", redis_url=redis_url)
    assert "was submitted already" in again.stderr
    other = run_producer(
        "submit", whole, "--map", "prompt={text}", "--batch-id", "b1", redis_url=redis_url
    )
    assert other.returncode == 2
    assert "submitted from a different file" in other.stderr


def test_rows_are_queued_in_a_planned_order_and_resumed_in_it(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    shared = [f"{f'beginning {n % 7} ' * 200}{n}" for n in range(700)]
    limits = [-1 if n == 5 else 9 for n in range(700)]
    whole = table(tmp_path / "in.parquet", 700, text=shared, n=limits)
    args = ("submit", whole, *MAP, "--map", "max_tokens=n", "--batch-id", "b1")
    done = run_producer(*args, "--order", "prefix", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert "order: prefix" in done.stderr
    assert "first bad line: row 6, column n, field max_tokens: " in done.stderr
    names = [message["headers"]["warmq"]["custom_id"] for message in queued(store)]
    assert names != sorted(names, key=lambda name: int(name[1:]))
    assert len(set(names)) == 699
    again = run_producer(*args, "--order", "prefix", redis_url=redis_url)
    assert "was submitted already" in again.stderr


def test_a_submit_that_was_killed_goes_on_where_it_stopped(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    whole = table(tmp_path / "in.parquet", 20_000)
    command = producer_command("submit", whole, *MAP, "--batch-id", "b1")
    with subprocess.Popen(
        command, env=producer_env(redis_url), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        eventually(lambda: bool(store.batch("b1") and state(store, "b1").number("cursor")), 20, "")
        process.kill()
    done = run_producer("submit", whole, *MAP, "--batch-id", "b1", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    names = [message["headers"]["warmq"]["custom_id"] for message in queued(store)]
    assert names == [f"r{n}" for n in range(20_000)]


def test_bad_rows_get_error_results_that_name_row_and_column(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    whole = table(tmp_path / "in.parquet", 3, n=[1, -1, None])
    args = ("submit", whole, *MAP, "--map", "max_tokens=n", "--batch-id", "b1")
    done = run_producer(*args, redis_url=redis_url)
    assert "first bad line: row 2, column n, field max_tokens: " in done.stderr
    run_all(store)
    out = tmp_path / "out.jsonl"
    done = run_producer("results", "b1", "-o", out, redis_url=redis_url)
    assert done.returncode == 1
    assert [result["custom_id"] for result in results(out)] == ["r0", "r2"]
    (error,) = results(tmp_path / "out.errors.jsonl")
    assert (error["custom_id"], error["error"]["line"]) == ("r1", 2)
    assert error["error"]["message"].startswith("row 2, column n, field max_tokens: is below 1")


@pytest.mark.parametrize("order", ["input", "prefix"])
def test_a_run_of_a_table_gives_what_a_run_of_its_lines_gives(
    redis_url: str, tmp_path: Path, order: str
):
    whole, same = table(tmp_path / "in.parquet", 2500), lines(tmp_path / "in.jsonl", 2500)
    found = []
    with simulated(redis_url, tmp_path / "worker.log"):
        for source, mapped in ((whole, MAP), (same, ())):
            out = tmp_path / f"{source.name}.out.jsonl"
            args = ("run", source, out, *mapped, "--window", "1000", "--order", order)
            done = run_producer(*args, redis_url=redis_url)
            assert done.returncode == 0, done.stderr
            found.append(
                [
                    (r["custom_id"], r["warmq"]["line"], r["response"]["body"]["choices"])
                    for r in results(out)
                ]
            )
            again = run_producer(*args, redis_url=redis_url)
            assert "was complete already, 2500 results" in again.stderr
    assert found[0] == found[1]
    assert [line for _, line, _ in found[0]] == list(range(1, 2501))
    other = table(whole, 2501)
    done = run_producer("run", other, tmp_path / "in.parquet.out.jsonl", *MAP, redis_url=redis_url)
    assert done.returncode == 2
    assert "is of a run of another input" in done.stderr


def test_a_table_is_planned_as_its_lines_are(redis_url: str, tmp_path: Path):
    whole, same = table(tmp_path / "in.parquet", 700), lines(tmp_path / "in.jsonl", 700)
    plans = [
        orjson.loads(
            run_producer("plan", *args, "--estimate", "--json", redis_url=redis_url).stdout
        )
        for args in ((whole, *MAP), (same,))
    ]
    for plan in plans:
        del plan["input_file"]
    assert plans[0] == plans[1]


def test_the_setting_limits_the_rows_of_csv_and_only_a_longer_one_fails(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    whole = tmp_path / "in.csv"
    whole.write_text(f'id,text\na,1\nb,"{"x" * 11_000_000}"\nc,2\n')
    refused = "row 2: longer than 10485760 bytes (it has 110000"
    for command, most, fits in (("plan", "", 0), ("plan", "20000000", 1), ("submit", "", 0)):
        done = run_producer(
            command,
            whole,
            *MAP,
            redis_url=redis_url,
            **({"WARMQ_MAX_LINE_BYTES": most} if most else {}),
        )
        for told in (refused, "raise WARMQ_MAX_LINE_BYTES"):
            assert (told in done.stdout + done.stderr) is not bool(fits), done
    names = [message["headers"]["warmq"]["custom_id"] for message in queued(store)]
    assert names == ["a", "c"]


@pytest.mark.parametrize("command", ["submit", "run"])
@pytest.mark.parametrize("order", ["input", "prefix"])
@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_a_row_that_is_too_long_is_found_by_its_id_in_the_output(
    redis_url: str, tmp_path: Path, command: str, order: str, ending: str
):
    columns = {"id": [11, 12, 13, 14], "text": ["a", "x" * 5000, "c", None], "source": [*"pqrs"]}
    whole, out = tmp_path / f"in.{ending}", tmp_path / f"out.{ending}"
    if ending == "csv":
        csv.write_csv(pa.table(columns), whole)
    else:
        pq.write_table(pa.table(columns), whole)
    name = ("--batch-id", "b1", "-o", out) if command == "submit" else (out,)
    mapped = (*MAP, "--keep", "all", "--order", order)
    with simulated(redis_url, tmp_path / "worker.log"):
        done = run_producer(
            command, whole, *name, *mapped, redis_url=redis_url, WARMQ_MAX_LINE_BYTES="2000"
        )
    assert done.returncode == 1, done.stderr
    found = (csv.read_csv if ending == "csv" else pq.read_table)(out).to_pydict()
    assert found["id"] == found["custom_id"] == [11, 12, 13, 14]
    assert found["source"] == [*"pqrs"]
    assert found["line"] == [1, 2, 3, 4]
    assert found["status"] == ["completed", "failed", "completed", "failed"]
    assert found["error_code"][1] == "line_too_long"
    assert found["error_message"][1].endswith("text")
    assert found["input_text"][1:3] == ["" if ending == "csv" else None, "c"]


@pytest.mark.parametrize(
    ("mapped", "told"),
    [
        (("prompt",), "--map: 'prompt': write FIELD=COLUMN"),
        (("prompt=text", "prompt=id"), "--map: 'prompt=id': prompt has 'text' already"),
        (("prompt=txt",), "--map: field prompt: there is no column 'txt'; did you mean text?"),
        ((), "--map: there is no prompt; unused columns: id, text; map a field"),
    ],
)
def test_a_wrong_mapping_ends_the_command_before_anything_is_queued(
    redis_url: str, store: BatchStore, tmp_path: Path, mapped: tuple[str, ...], told: str
):
    whole = table(tmp_path / "in.parquet", 3)
    pairs = [word for pair in mapped for word in ("--map", pair)]
    done = run_producer("submit", whole, *pairs, redis_url=redis_url)
    assert done.returncode == 2
    assert told in done.stderr
    assert not store.batches()


def test_the_client_takes_tables_frames_and_rows_with_columns(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    whole = table(tmp_path / "in.parquet", 3)
    columns = {"prompt": "Say: {text}", "custom_id": "id"}
    given = (whole, pq.read_table(whole), pq.read_table(whole).to_pylist())
    with Client(redis_url) as client:
        batches = [client.submit(each, columns=columns) for each in given]
        run_all(store)
        for batch in batches:
            assert [result.custom_id for result in batch.results("input")] == ["r0", "r1", "r2"]
    digests = {state(store, batch.id).fields["digest"] for batch in batches}
    assert len(digests) == 1
