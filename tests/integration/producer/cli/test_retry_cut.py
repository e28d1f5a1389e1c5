"""`retry --cut`: what ended at max_tokens runs again, with more of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson
import pytest
import redis
from kit.commands.json_output import check
from kit.commands.support import (
    TTL_MS,
    answer,
    batch_file,
    queued,
    run_all,
    run_producer,
    write_lines,
)
from kit.protocol.lessee import Lessee, client_of, counts, now, submit_batch

from contract.errors import BatchConflict
from contract.message import read_delivery
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.results import is_cut, is_last_cut, success_meta
from producer import Client
from producer.input.reader import InputUnreadable
from worker.drain.endings import Ending, done_arguments


def finish_cut(store: BatchStore, count: int) -> None:
    """Answer the next requests as a worker whose engine reached max_tokens."""
    lessee = Lessee(client_of(store))
    endings = []
    for lease in lessee.pop(count):
        it = read_delivery(lease.id, lease.message)
        body = answer("a beginn")
        body["choices"][0]["finish_reason"] = "length"
        endings.append(Ending(it, "completed", success_meta(it, orjson.dumps(body), {}), cut=True))
    lessee.run("done", lessee.worker, TTL_MS, *done_arguments(endings))


@pytest.mark.parametrize(
    ("body", "cut"),
    [
        (b'{"choices":[{"finish_reason":"stop"},{"index":1,"finish_reason":"length"}]}', True),
        (b'{"choices":[{"text":"\\"finish_reason\\":\\"length\\""}]}', False),
        (b'{"choices":[{"stop_reason":"max_tokens","token_ids":null}]}', False),
        (b'{"type":"message","stop_reason":"max_tokens","usage":{}}', True),
        (b'{"type":"message","stop_reason":"max_tokens","stop_sequence":null,"usage":{}}', True),
        (b'{"object":"response","incomplete_details":{"reason":"max_output_tokens"}}', True),
        (b'{"object":"response","incomplete_details":null}', False),
    ],
)  # fmt: skip
def test_an_answer_of_any_endpoint_is_known_as_cut(body: bytes, cut: bool) -> None:
    assert is_cut(body) == is_last_cut(body) == cut


@pytest.mark.parametrize("retired", [False, True])
def test_cut_answers_run_again_with_other_fields_and_are_counted(
    redis_url: str, tmp_path: Path, store: BatchStore, retired: bool
) -> None:
    path = batch_file(tmp_path / "in.jsonl", 5)
    run_producer("submit", path, "--batch-id", "b1", "--set", "max_tokens=3", redis_url=redis_url)
    finish_cut(store, 3)
    run_all(store)
    assert counts(now(store)) == {"completed": 5}
    if retired:
        ids = [rid for chunk in store.index("b1") for rid in chunk.request_ids("b1")]
        Lessee(client_of(store)).run("retire", "b1", now(store).life, TTL_MS, 1, *ids)
    state = orjson.loads(run_producer("status", "b1", "--json", redis_url=redis_url).stdout)
    assert state["cut"] == 3
    cut = "3 answers were cut at max_tokens: producer retry b1 --cut --set max_tokens=N"
    assert cut in run_producer("status", "b1", redis_url=redis_url).stdout
    for command in ("watch", "results"):
        told = run_producer(command, "b1", redis_url=redis_url).stderr
        assert told.rstrip().endswith(cut)
    done = run_producer("retry", "b1", "--cut", "--set", "max_tokens=4096", "--json",
                        redis_url=redis_url)  # fmt: skip
    assert orjson.loads(done.stdout) == {"id": "b1", "requests": 3}
    assert (now(store).status, now(store).number("cut")) == ("in_progress", 0)
    bodies = [orjson.loads(message["body"])[0][0] for message in queued(store)]
    assert [body["max_tokens"] for body in bodies] == [4096] * 3
    run_all(store)
    assert (now(store).status, counts(now(store))) == ("completed", {"completed": 5})
    results = run_producer("results", "b1", redis_url=redis_url).stdout.splitlines()
    assert [orjson.loads(line)["custom_id"] for line in results] == [f"r{n}" for n in range(5)]
    assert not any(is_cut(line.encode()) for line in results)
    shown = run_producer("status", "b1", redis_url=redis_url).stdout.splitlines()
    named = {name: rest for name, _, rest in (line.partition(" ") for line in shown)}
    assert named["tokens"].endswith(", with retries")
    assert "took" not in named  # it would count the pause before the retry
    again = run_producer("retry", "b1", "--cut", redis_url=redis_url)
    assert "no answer so far ended at max_tokens" in again.stderr
    assert store.expires_in_s("b1") is None


def test_a_cancel_that_is_not_complete_is_not_lifted(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    path = batch_file(tmp_path / "in.jsonl", 5)
    run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)
    finish_cut(store, 3)
    store.begin_cancel(now(store))
    done = run_producer("retry", "b1", "--cut", redis_url=redis_url)
    assert (done.returncode, "cancel it again" in done.stderr) == (2, True)
    assert (now(store).status, counts(now(store))) == ("cancelling", {"completed": 3})
    with Client(redis_url) as client:
        with pytest.raises(BatchConflict, match="is being cancelled"):
            client.batch("b1").retry_cut()
        client.batch("b1").cancel()
        assert client.batch("b1").retry_cut() == 3
    run_all(store)
    assert counts(now(store)) == {"completed": 3, "cancelled": 2}


def test_a_corrected_file_is_a_batch_of_its_own(redis_url: str) -> None:
    done = run_producer("retry", "b1", "fixed.jsonl", redis_url=redis_url)
    assert done.returncode == 2
    assert "`producer submit`" in done.stderr and "label-a-table.md, step 4" in done.stderr


def test_a_new_limit_of_tokens_goes_into_the_field_that_a_line_has(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    bodies = [
        chat, chat | {"max_tokens": 3}, chat | {"max_completion_tokens": 3},
        chat | {"max_tokens": 3, "max_completion_tokens": 3}, {"prompt": "x", "max_tokens": 3},
        {"input": "x"}, {"input": "x", "max_output_tokens": 3},
    ]  # fmt: skip
    urls = ["/v1/chat/completions"] * 4 + ["/v1/completions"] + ["/v1/responses"] * 2
    path = write_lines(tmp_path / "in.jsonl", (
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": body}
        for n, (url, body) in enumerate(zip(urls, bodies, strict=True))
    ))  # fmt: skip
    run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)
    finish_cut(store, 7)
    done = run_producer("retry", "b1", "--cut", "--set", "max_tokens=9", redis_url=redis_url)
    assert "7 requests queued again" in done.stderr
    sent = {}
    for message in queued(store):
        body = orjson.loads(message["body"])[0][0]
        found = {name: value for name, value in body.items() if name.startswith("max_")}
        sent[message["headers"]["warmq"]["custom_id"]] = found
    assert sent == {
        "r0": {"max_tokens": 9}, "r1": {"max_tokens": 9}, "r2": {"max_completion_tokens": 9},
        "r3": {"max_tokens": 9, "max_completion_tokens": 9}, "r4": {"max_tokens": 9},
        "r5": {"max_output_tokens": 9}, "r6": {"max_output_tokens": 9},
    }  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 3}, {"max_tokens": 2}])
def test_an_answer_that_would_be_cut_in_the_same_way_does_not_run_again(
    redis_url: str, tmp_path: Path, store: BatchStore, fields: dict[str, int]
) -> None:
    greedy = {"prompt": "x", "temperature": 0, "max_tokens": 3}
    lines = [greedy, greedy, greedy | {"temperature": 1}]
    path = write_lines(tmp_path / "in.jsonl", lines)
    run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)
    finish_cut(store, 3)
    words = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    done = run_producer("retry", "b1", "--cut", *words, redis_url=redis_url)
    assert "1 request queued again" in done.stderr
    assert "2 answers stay" in done.stderr and "give a higher max_tokens" in done.stderr
    assert len(queued(store)) == 1
    run_all(store)
    done = run_producer("retry", "b1", "--cut", *words, redis_url=redis_url)
    assert (done.returncode, "2 answers stay" in done.stderr) == (2, True)
    with Client(redis_url) as client, pytest.raises(BatchConflict, match="2 answers stay"):
        client.batch("b1").retry_cut(fields)
    done = run_producer("retry", "b1", "--cut", "--set", "max_tokens=4", redis_url=redis_url)
    assert "2 requests queued again" in done.stderr


def test_a_csv_file_is_read_again_with_its_delimiter(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id|text\n1|one\n2|two\n")
    run_producer("submit", path, "--batch-id", "b1", "--map", "prompt=Say {text}",
                 "--delimiter", "|", redis_url=redis_url)  # fmt: skip
    finish_cut(store, 2)
    done = run_producer("retry", "b1", "--cut", redis_url=redis_url)
    assert "2 requests queued again" in done.stderr
    finish_cut(store, 2)
    with Client(redis_url) as client:
        assert client.batch("b1").retry_cut() == 2


@pytest.mark.parametrize("more", [(), ("--keep", "text"), ("--delimiter", ";")])
def test_a_table_is_read_again_with_its_mapping(
    redis_url: str, tmp_path: Path, store: BatchStore, more: tuple[str, ...]
) -> None:
    path, mark = tmp_path / "rows.csv", ";" if ";" in more else ","
    path.write_text("id,text\n1,one\n2,two\n3,three\n".replace(",", mark))
    run_producer("submit", path, "--batch-id", "b1", "--map", "prompt=Say {text}",
                 "--map", "custom_id=id", *more, redis_url=redis_url)  # fmt: skip
    finish_cut(store, 1)
    run_all(store)
    assert run_producer("retry", "b1", "--cut", redis_url=redis_url).returncode == 0
    (message,) = queued(store)
    assert message["headers"]["warmq"]["custom_id"] == "1"
    assert orjson.loads(message["body"])[0][0]["prompt"] == "Say one"


def test_another_file_is_refused_and_the_batch_stays(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    path = batch_file(tmp_path / "in.jsonl", 2)
    run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)
    finish_cut(store, 2)
    batch_file(path, 2, prefix="other")
    done = run_producer("retry", "b1", "--cut", redis_url=redis_url)
    assert done.returncode == 2
    assert "was submitted from a different file" in done.stderr
    path.unlink()
    done = run_producer("retry", "b1", "--cut", redis_url=redis_url)
    assert done.returncode == 2
    assert "producer retry b1 FILE --cut" in done.stderr
    assert now(store).status == "completed"
    moved = batch_file(tmp_path / "moved.jsonl", 2)
    done = run_producer("retry", "b1", moved, "--cut", redis_url=redis_url)
    assert "2 requests queued again" in done.stderr


@pytest.mark.parametrize(
    "args", [("--cut", "--include", "cancelled"), ("--set", "max_tokens=5"), ("in.jsonl",)]
)
def test_options_that_do_not_go_together_are_refused(
    redis_url: str, store: BatchStore, args: tuple[str, ...]
) -> None:
    done = run_producer("retry", "b1", *args, redis_url=redis_url)
    assert done.returncode == 2
    assert "--cut" in done.stderr


def test_the_client_runs_again_what_it_has_submitted(redis_url: str, store: BatchStore) -> None:
    rows = [{"prompt": f"p{n}", "max_tokens": 1} for n in range(4)]
    with Client(redis_url) as client:
        batch = client.submit(rows, batch_id="b1")
        finish_cut(store, 3)
        run_all(store)
        assert batch.status().cut == 3
        with pytest.raises(InputUnreadable, match="submit it again with the same batch_id"):
            client.batch("b1").retry_cut()
        assert {result.finish_reason for result in batch.results()} == {"length", "stop"}
        same = client.submit(rows, batch_id="b1")
        assert same.retry_cut({"max_tokens": 9}) == 3
        run_all(store)
        status = same.status()
        assert (status.status, status.completed, status.cut) == ("completed", 4, 0)


def test_a_leader_runs_again_for_its_followers(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt":"x","temperature":0}\n' * 3)
    run_producer("submit", path, "--batch-id", "b1", "--dedupe", redis_url=redis_url)
    finish_cut(store, 1)
    assert (counts(now(store)), now(store).number("cut")) == ({"completed": 3}, 1)
    done = run_producer("retry", "b1", "--cut", "--json", redis_url=redis_url)
    check("changed", orjson.loads(done.stdout))
    assert orjson.loads(done.stdout)["requests"] == 3
    run_all(store)
    assert counts(now(store)) == {"completed": 3}


def test_the_cut_answer_of_a_plain_request_with_the_same_id_stays(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    # Given a request of a batch that waits, and a plain request with its id that was answered.
    submitted, worker = submit_batch(store, 1), Lessee(client_of(store))
    (rid,) = submitted.ids
    meta = b'{"status":"SUCCESS","result":{"choices":[{"finish_reason":"length"}]}}'
    redis_client.set(keys.result_key(rid), meta, px=TTL_MS)
    (message,) = redis_client.lrange(submitted.list_key, 0, -1)
    digest = hashlib.sha1(meta, usedforsecurity=False).hexdigest()
    assert store.retry_cut(submitted.batch, [(rid, digest, "warmq", message)]) == 0
    assert len(worker.pop()) == 1
    assert counts(now(store)) == {}
