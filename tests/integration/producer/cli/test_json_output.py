"""Every document that --json prints is what docs/reference/json.schema.json says.

`run_producer` checks each command line that any test runs; here each command runs once, with
documents of all kinds, and the check itself is checked.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import click
import orjson
import pytest
from jsonschema import ValidationError
from kit.commands import json_output
from kit.commands.support import (
    as_json,
    chat_line,
    finish,
    producer_command,
    producer_env,
    run_all,
    run_producer,
    write_lines,
)
from kit.protocol.lessee import Lessee, celery_message, client_of, submit_batch

from contract.errors import RequestFailed
from contract.naming import DEFAULT_QUEUE, LISTEN_CHANNEL
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import ROOT, eventually
from producer.cli.main import cli


def commands() -> dict[str, click.Command]:
    """Return every command that can print JSON, by the words it is called with."""
    found: dict[str, click.Command] = {}
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        below = command.commands if isinstance(command, click.Group) else {"": command}
        found |= {f"{name} {word}".strip(): each for word, each in below.items()}
    return found


def test_every_command_has_json_and_a_documented_document() -> None:
    without = [
        name for name, command in commands().items()
        if "as_json" not in {parameter.name for parameter in command.params}
    ]  # fmt: skip
    # The first prints nothing but JSON, the second nothing but its log, the third what people see.
    assert without == ["dead show", "serve", "top"]
    assert set(commands()) - {"serve", "top"} == {
        name.partition(" -")[0] for name in json_output.DOCUMENTS
    }


def test_the_schema_names_the_command_that_prints_each_document() -> None:
    defs = orjson.loads(json_output.SCHEMA.read_bytes())["$defs"]
    for words, document in json_output.DOCUMENTS.items():
        first, _, option = words.partition(" --")
        lines = defs[document]["x-printed-by"]
        assert any(line.startswith(f"producer {first}") and option in line for line in lines), words


def half_done(store: BatchStore) -> None:
    """Leave batch b1 with an answered, a failed and a waiting request that came back once."""
    submit_batch(store, 3)
    lessee = Lessee(client_of(store))
    one, two, three = lessee.pop()
    finish(lessee, [one])
    finish(lessee, [two], RequestFailed("no"))
    lessee.release(three)


def test_a_batch_and_its_requests_in_each_state(redis_url: str, store: BatchStore) -> None:
    half_done(store)
    for words in (["list"], ["status", "b1"], *(["status", "b1", "--request", f"c{n}"]
                                                for n in (1, 2, 3))):  # fmt: skip
        assert as_json(run_producer(*words, "--json", redis_url=redis_url))
    assert as_json(run_producer("cancel", "b1", "--json", redis_url=redis_url))["requests"] == 1
    assert as_json(run_producer("watch", "b1", "--json", redis_url=redis_url))["finished_at"]
    for name in ("c1", "c2", "c3"):
        as_json(run_producer("status", "b1", "--request", name, "--json", redis_url=redis_url))
    assert as_json(run_producer("retry", "b1", "--json", redis_url=redis_url))["requests"] == 1
    forced = run_producer("delete", "b1", "--force", "--json", redis_url=redis_url)
    assert as_json(forced)["deleted"]
    assert as_json(run_producer("list", "--json", redis_url=redis_url)) == []


def test_a_request_whose_result_is_gone_says_so(redis_url: str, store: BatchStore) -> None:
    batch = submit_batch(store, 1)
    run_all(store)
    client_of(store).delete(keys.result_key(batch.ids[0]))
    words = ("status", "b1", "--request", "c1", "--json")
    shown = as_json(run_producer(*words, redis_url=redis_url))
    assert shown["status"] == "result_expired"
    assert shown["result"]["error"]["code"] == "result_expired"


def test_submit_prints_the_id_and_the_batch(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "in.jsonl", [chat_line("one", model="x"), b"no JSON"])
    words = ("--model", "x", "--deadline", "2h", "--json")
    done = run_producer("submit", file, *words, redis_url=redis_url)
    assert len(done.stdout.splitlines()) == 2
    nothing = write_lines(tmp_path / "bad.jsonl", [b'{"prompt": "x", "frobnicate": 1}'])
    done = run_producer("submit", nothing, "--json", redis_url=redis_url)
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 2
    no_lines = write_lines(tmp_path / "text.jsonl", [b"no JSON"])  # refused before there is a batch
    done = run_producer("submit", no_lines, "--json", redis_url=redis_url)
    assert (done.returncode, done.stdout) == (2, "")


def test_dead_letters(redis_url: str, store: BatchStore) -> None:
    client_of(store).lpush(DEFAULT_QUEUE, b"junk", celery_message("t1", task="other"))
    Lessee(client_of(store)).pop()
    (letter,) = as_json(run_producer("dead", "list", "--json", redis_url=redis_url))
    shown = as_json(run_producer("dead", "show", letter["id"], redis_url=redis_url))
    assert shown["message"] == "junk"
    for word in ("retry", "delete"):
        as_json(run_producer("dead", word, "--all", "--json", redis_url=redis_url))


def test_the_entries_of_a_stream(redis_url: str, store: BatchStore) -> None:
    submit_batch(store, 1)
    with subprocess.Popen(
        producer_command("watch", "b1", "--request", "c1", "--stream", "--json"),
        env=producer_env(redis_url), stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        with client_of(store).pubsub(ignore_subscribe_messages=True) as announced:
            announced.subscribe(LISTEN_CHANNEL)
            eventually(announced.get_message, 30, "it announces itself")
        run_all(store)
        printed, _ = process.communicate(timeout=30)
    lines = [orjson.loads(line) for line in printed.splitlines()]
    assert [line["event"] for line in lines] == ["begin", "text", "end"]
    for line in lines:
        json_output.check("stream_entry", line)


def test_results_go_to_their_file_and_the_summary_to_stdout(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    half_done(store)
    run_all(store)
    out = tmp_path / "out.jsonl"
    done = run_producer("results", "b1", "-o", out, "--json", redis_url=redis_url)
    beside = tmp_path / "out.errors.jsonl"
    assert as_json(done) == {
        "id": "b1", "object": "warmq.results", "output": str(out), "errors_file": str(beside),
        "request_counts": {"completed": 2, "failed": 1},
    }  # fmt: skip
    for file in (out, beside):
        for line in file.read_bytes().splitlines():
            json_output.check("result_line", orjson.loads(line))


@pytest.mark.parametrize("errors", [None, "bad.jsonl"])
def test_both_files_are_told_as_they_were_given(
    redis_url: str, store: BatchStore, tmp_path: Path, errors: str | None
) -> None:
    half_done(store)
    run_all(store)
    words = ["-o", "out.jsonl", *(["--errors", errors] if errors else [])]
    done = subprocess.run(
        producer_command("results", "b1", *words, "--json"), cwd=tmp_path,
        env=producer_env(redis_url), capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = as_json(done)
    assert (told["output"], told["errors_file"]) == ("out.jsonl", errors or "out.errors.jsonl")


@pytest.mark.parametrize("words", [(), ("-o", "-")])
def test_results_on_stdout_put_the_summary_on_stderr(
    redis_url: str, store: BatchStore, words: tuple[str, ...]
) -> None:
    submit_batch(store, 2)
    run_all(store)
    done = run_producer("results", "b1", *words, "--json", redis_url=redis_url)
    for line in done.stdout.splitlines():
        json_output.check("result_line", orjson.loads(line))
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("{")]
    json_output.check("results", orjson.loads(told))
    assert orjson.loads(told)["output"] is None


@pytest.mark.parametrize("bad", [[], [b"no JSON"]])
def test_a_run_says_what_it_has_written(
    redis_url: str, store: BatchStore, tmp_path: Path, bad: list[bytes]
) -> None:
    file = write_lines(tmp_path / "in.jsonl", [chat_line("one"), *bad])
    out = tmp_path / "out.jsonl"
    with subprocess.Popen(
        producer_command("run", file, out, "--json"),
        env=producer_env(redis_url), stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        eventually(lambda: run_all(store), 30, "the request is queued, and answered")
        printed, _ = process.communicate(timeout=30)
    json_output.check("run", orjson.loads(printed))
    beside = str(tmp_path / "out.errors.jsonl") if bad else None
    assert orjson.loads(printed) == {
        "object": "warmq.run", "lines_read": 1 + len(bad), "output": str(out),
        "errors_file": beside, "request_counts": {"completed": 1, "failed": len(bad)},
    }  # fmt: skip


def test_a_document_with_a_field_that_is_not_documented_or_without_one_that_is_fails(
    redis_url: str, store: BatchStore
) -> None:
    half_done(store)
    batch = as_json(run_producer("status", "b1", "--json", redis_url=redis_url))
    json_output.check("batch", batch)
    wrong = [copy.deepcopy(batch) for _ in range(4)]
    wrong[0]["more"] = 1
    del wrong[1]["usage"]["total_tokens"]
    wrong[2]["object"] = "batch"
    wrong[3]["created_at"] = 5
    for document in wrong:
        with pytest.raises(ValidationError):
            json_output.check("batch", document)


def test_the_page_has_the_tables_of_the_schema() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs_tables", "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/reference/json.md").read_text()
    defs = orjson.loads(json_output.SCHEMA.read_bytes())["$defs"]
    assert set(re.findall(r"^### `(\w+)`", page, re.MULTILINE)) == set(defs)
