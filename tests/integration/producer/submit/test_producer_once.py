"""`submit --dedupe`: one answer for all lines with the same repeatable body."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.once import (
    ASKED,
    ONCE,
    collect,
    counts,
    custom_ids,
    greedy,
    outcome,
    six_lines,
    waiting,
)
from kit.commands.submitting import ONCE as WITHOUT
from kit.commands.submitting import submit
from kit.commands.support import (
    chat_line,
    finish,
    queued,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.drain.draining import draining, soon
from kit.protocol.lessee import Lessee, client_of

from contract import naming
from contract.errors import RequestFailed
from contract.redis import keys
from contract.redis.batches import BatchStore
from producer.input import reader
from producer.input.reader import RawChunk
from producer.submit.submission import Submission
from worker.engine.simulated.engine import SimulatedEngine, digest


@pytest.mark.asyncio
async def test_all_lines_are_answered_and_one_of_each_question_is_computed(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    submit(store, six_lines(tmp_path / "in"), ONCE)
    assert waiting(store) == ["a", "b", "e"]
    log = tmp_path / "log"
    async with draining(redis_url, partial(SimulatedEngine, log=log)):  # type: ignore[arg-type]
        await soon(lambda: state(store, "b1").finished)
    assert log.read_text().count("start") == 3
    assert counts(store) == {"total": 6, "valid": 6, "identical": 3, "completed": 6}
    assert state(store, "b1").status == "completed"
    lines = collect(store)
    assert custom_ids(lines) == list(ASKED)
    for line in lines:
        text = line["response"]["body"]["choices"][0]["message"]["content"]
        body = greedy(None, ASKED[line["custom_id"]])["body"]
        assert text == f"simulated {digest(body)}"
    usage = [line["response"]["body"]["usage"] for line in lines if "same_as" not in line["warmq"]]
    assert state(store, "b1").number("prompt_tokens") == sum(u["prompt_tokens"] for u in usage)


def test_a_line_that_another_answers_says_so_and_keeps_its_own_name(
    store: BatchStore, tmp_path: Path
):
    submit(store, six_lines(tmp_path / "in"), ONCE)
    run_all(store)
    a, _, c, _, _, f = collect(store)
    leader = naming.request_id("b1", "a")
    assert a["warmq"].keys() == {"line", "timing"}
    assert (c["id"], c["custom_id"]) == (f"batch_req_{naming.request_id('b1', 'c')}", "c")
    assert (c["warmq"]["line"], c["warmq"]["same_as"]) == (3, "a")
    assert c["response"] == a["response"] == f["response"]
    assert c["response"]["request_id"] == leader


def test_without_the_option_and_without_temperature_0_every_line_runs(
    store: BatchStore, tmp_path: Path
):
    path = six_lines(tmp_path / "in")
    submit(store, path, WITHOUT)
    assert waiting(store) == list(ASKED)
    assert client_of(store).exists(keys.batch_key("b1", "identical")) == 0
    path = write_lines(tmp_path / "in", (chat_line(n, text) for n, text in ASKED.items()))
    submit(store, path, Submission("b2", "warmq.other", 6, dedupe=True))
    assert len(queued(store, "warmq.other")) == 6


def test_lines_are_the_same_only_after_the_overrides(store: BatchStore, tmp_path: Path):
    path = write_lines(tmp_path / "in", (chat_line(n, text) for n, text in ASKED.items()))
    overrides = {"temperature": 0}
    submit(store, path, Submission("b1", "warmq", 6, "", overrides, dedupe=True))
    assert waiting(store) == ["a", "b", "e"]


def test_bad_lines_and_repeated_custom_ids_stay_errors(store: BatchStore, tmp_path: Path):
    lines = [greedy("a", "one"), b"{", greedy("a", "one"), greedy("a", "two"), greedy("b", "two")]
    path = write_lines(tmp_path / "in", [*lines, greedy(None, "two"), greedy("c", "one", n=0)])
    submit(store, path, ONCE)
    assert waiting(store) == ["a", "b"]
    run_all(store)
    for order in ("input", "completion"):
        found = sorted(
            collect(store, order), key=lambda line: (line["error"] or line["warmq"])["line"]
        )
        assert [outcome(line) for line in found] == [
            "completed", "failed", "failed", "failed", "completed", "completed", "failed"
        ]  # fmt: skip
        assert [(line.get("warmq") or {}).get("same_as") for line in found][5] == "b"
    assert counts(store) == {
        "total": 7, "valid": 3, "identical": 1, "completed": 3, "failed": 4
    }  # fmt: skip


def test_followers_come_with_their_leader_in_completion_order(store: BatchStore, tmp_path: Path):
    submit(store, six_lines(tmp_path / "in"), ONCE)
    lessee = Lessee(client_of(store))
    a, b, e = lessee.pop()
    finish(lessee, [b])
    partly = collect(store, "completion", partial=True)
    assert custom_ids(partly) == ["b", "d"]
    assert custom_ids(collect(store, "input", partial=True)) == ["b", "d"]
    finish(lessee, [e])
    finish(lessee, [a], RequestFailed("no"))
    lines = collect(store, "completion")
    assert custom_ids(lines) == ["b", "d", "e", "a", "c", "f"]
    assert lines[4]["error"] == {
        "code": "request_failed", "message": "no", "line": 3, "same_as": "a"
    }  # fmt: skip


def test_a_line_that_comes_after_its_leader_ended_has_its_ending_at_once(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reader, "CHUNK_LINES", 2)
    lessee, fates = Lessee(client_of(store)), {"a": None, "b": RequestFailed("no")}
    given: list[str] = []

    def watch(chunks: Iterator[RawChunk]) -> Iterator[RawChunk]:
        yield next(chunks)
        leases: list[Any] = []
        while len(leases) < 2:
            leases += lessee.pop()
        for lease, fate in zip(leases, fates.values(), strict=True):
            finish(lessee, [lease], fate)
        given.extend(custom_ids(collect(store, "completion", partial=True)))
        yield from chunks

    submit(store, six_lines(tmp_path / "in"), ONCE, watch=watch)
    assert given[:2] == ["a", "b"]
    assert counts(store) == {
        "total": 6, "valid": 6, "identical": 3, "completed": 3, "failed": 2
    }  # fmt: skip
    assert not state(store, "b1").finished
    assert run_all(store) == 1
    assert state(store, "b1").finished
    assert sorted(custom_ids(collect(store, "completion"))) == sorted(ASKED)


def test_a_failed_leader_is_retried_for_all_its_followers(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    submit(store, six_lines(tmp_path / "in"), ONCE)
    lessee = Lessee(client_of(store))
    a, *others = lessee.pop()
    finish(lessee, [a], RequestFailed("no"))
    finish(lessee, others)
    assert counts(store)["failed"] == 3
    done = run_producer("retry", "b1", "--json", redis_url=redis_url)
    assert orjson.loads(done.stdout) == {"id": "b1", "requests": 3}
    assert waiting(store) == ["a"]
    assert "failed" not in counts(store)
    run_all(store)
    assert counts(store)["completed"] == 6
    for order in ("input", "completion"):
        lines = collect(store, order)
        assert sorted(custom_ids(lines)) == sorted(ASKED)
        assert {outcome(line) for line in lines} == {"completed"}


def test_a_dead_letter_is_one_of_all_its_lines(redis_url: str, store: BatchStore, tmp_path: Path):
    submit(store, six_lines(tmp_path / "in"), ONCE)
    lessee = Lessee(client_of(store))
    a, *others = lessee.pop()
    lessee.bury(a, "unreadable")
    finish(lessee, others)
    assert counts(store)["failed"] == 3
    assert state(store, "b1").finished
    run_producer("dead", "retry", "--all", redis_url=redis_url)
    assert "failed" not in counts(store)
    run_all(store)
    assert counts(store)["completed"] == 6


def test_a_follower_is_cancelled_only_with_its_leader(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    submit(store, six_lines(tmp_path / "in"), ONCE)
    refused = run_producer("cancel", "b1", "--request", "c", redis_url=redis_url)
    assert refused.returncode == 2
    assert "request 'c' of batch b1 is answered by request 'a'" in refused.stderr
    assert "cancel 'a'" in refused.stderr
    told = run_producer("cancel", "b1", "--request", "a", redis_url=redis_url).stderr
    assert told == "b1: 3 requests cancelled\n"
    run_all(store)
    assert counts(store) == {
        "total": 6, "valid": 6, "identical": 3, "completed": 3, "cancelled": 3
    }  # fmt: skip
    assert [outcome(line) for line in collect(store)].count("cancelled") == 3


def test_a_batch_is_cancelled_with_all_lines_counted(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    submit(store, six_lines(tmp_path / "in"), ONCE)
    lessee = Lessee(client_of(store))
    lessee.pop(1)
    told = run_producer("cancel", "b1", redis_url=redis_url).stderr
    assert told.startswith("b1: 6 requests cancelled")
    batch = state(store, "b1")
    assert (batch.status, batch.number("cancelled")) == ("cancelled", 6)
    assert len(collect(store)) == 6
    assert store.retry(batch, ["cancelled"]) == 6
