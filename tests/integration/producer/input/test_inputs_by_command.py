"""Commands and client with inputs of other forms, and with options for structured answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.commands.support import queued, run_producer, state

from contract.redis.batches import BatchStore
from producer import Client

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def bodies(store: BatchStore) -> list[dict[str, Any]]:
    """Return the bodies of the queued requests."""
    return [orjson.loads(message["body"])[0][0] for message in queued(store)]


def test_an_answer_is_one_of_some_texts_or_follows_a_schema(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    lines, schema = tmp_path / "in.jsonl", tmp_path / "schema.json"
    lines.write_text('{"prompt": "x", "max_tokens": 4}\n')
    schema.write_bytes(orjson.dumps(SCHEMA))
    for name, option, value in (
        ("b1", ("--choice", "good,bad"), {"choice": ["good", "bad"]}),
        ("b2", ("--schema", schema), {"json": SCHEMA}),
    ):
        done = run_producer("submit", lines, "--batch-id", name, *option, redis_url=redis_url)
        assert (done.returncode, done.stderr.count("bad line")) == (0, 0)
        (body,) = [
            b["structured_outputs"] for b in bodies(store) if b["structured_outputs"] == value
        ]
        assert list(body.get("json", {}).get("properties", {})) in ([], ["b", "a"])
    options = orjson.loads(state(store, "b2").fields["options"])
    assert options["set"]["structured_outputs"] == {"json": SCHEMA}
    client = Client(redis_url)
    client.submit([{"prompt": "x"}], batch_id="b3", choice=["good", "bad"])
    asked = [body["structured_outputs"] for body in bodies(store)]
    assert asked.count({"choice": ["good", "bad"]}) == 2
    planned = run_producer("plan", lines, "--choice", "good,bad", "--json", redis_url=redis_url)
    assert orjson.loads(planned.stdout)["request_counts"]["valid"] == 1


@pytest.mark.parametrize("command", ["submit", "run", "plan"])
@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (b'[{"prompt": "x"},\n{"prompt": "y"}]', (), "jq -c '.[]'"),
        (b'{\n  "prompt": "x"\n}\n', (), "jq -c ."),
        ('{"prompt": "x"}'.encode("utf-16"), (), "iconv -f UTF-16 "),
        (b"PK\x03\x04", ("--map", "prompt=x"), "spreadsheet"),
        (b'{"prompt": "x"}', ("--choice", ""), "--choice: "),
        (b'{"prompt": "x"}', ("--set", "guided_choice=a,b c"), "or --choice 'a,b c'"),
        (b'{"prompt": "x"}', ("--choice", "a,b", "--choice", "a"), "all texts, --choice a,b\n"),
        (b'{"prompt": "x"}', ("--schema", "a", "--schema", "b"), "--schema is given 2 times"),
        (b'{"prompt": "x"}', ("--delimiter", ";"), "--delimiter: only CSV"),
    ],
)
def test_one_error_ends_the_command_before_there_is_a_batch(
    redis_url: str,
    store: BatchStore,
    tmp_path: Path,
    command: str,
    content: bytes,
    options: tuple[str, ...],
    words: str,
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    out = [tmp_path / "out.jsonl"] if command == "run" else []
    done = run_producer(command, tmp_path / "in.jsonl", *out, *options, redis_url=redis_url)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert store.newest_ids() == []


@pytest.mark.parametrize("command", ["submit", "plan"])
@pytest.mark.parametrize("option", ["--set=model=m", "--model=m"])
def test_a_model_in_set_is_told_to_choose_no_worker(
    redis_url: str, tmp_path: Path, command: str, option: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "x"}')
    done = run_producer(command, tmp_path / "in.jsonl", option, redis_url=redis_url)
    assert done.returncode == 0
    assert ("use --model" in done.stderr) == (option == "--set=model=m")


def test_a_csv_file_with_semicolons_names_the_option_and_runs_with_it(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    table = tmp_path / "in.csv"
    table.write_text("id;text\n1;good soup, cold\n")
    given = ("submit", table, "--batch-id", "b1", "--map", "prompt=text")
    refused = run_producer(*given, redis_url=redis_url)
    assert refused.returncode == 2
    assert "delimiter looks like ';'; give --delimiter ';'" in refused.stderr
    assert run_producer(*given, "--delimiter", ";", redis_url=redis_url).returncode == 0
    assert [body["prompt"] for body in bodies(store)] == ["good soup, cold"]
    plan = run_producer("plan", *given[1:2], *given[4:], "--delimiter", ";", redis_url=redis_url)
    assert plan.returncode == 0


def test_other_options_are_named_and_not_their_whole_values(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(50)}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    given = ("submit", tmp_path / "in.jsonl", "--batch-id", "b1", "--schema", tmp_path / "s.json")
    assert run_producer(*given, redis_url=redis_url).returncode == 0
    (tmp_path / "s.json").write_text(json.dumps({**schema, "title": "other"}))
    again = run_producer(*given, "--set", "max_tokens=4", redis_url=redis_url)
    assert again.returncode == 2
    assert "set max_tokens was not given, now 4" in again.stderr
    assert "set structured_outputs" in again.stderr
    assert len(again.stderr) < 500


def test_a_folder_of_partitions_is_one_table(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    for number in (10, 9):
        part = tmp_path / "t" / f"day={number}"
        part.mkdir(parents=True)
        for file in (1, 0):
            name = part / f"part.{file}.parquet"
            pq.write_table(pa.table({"text": [f"{number}.{file}"]}), name)
    pairs = ("--map", "prompt={day}: {text}", "--set", "max_tokens=4")
    assert run_producer("submit", tmp_path / "t", *pairs, redis_url=redis_url).returncode == 0
    assert [body["prompt"] for body in bodies(store)] == [
        "9: 9.0", "9: 9.1", "10: 10.0", "10: 10.1",
    ]  # fmt: skip
