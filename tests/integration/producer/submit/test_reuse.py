"""`submit --reuse`: known answers, from the first computation to the output file."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import orjson
import pytest
import redis
from kit.commands.known import (
    announce,
    answer_all,
    ask,
    asked,
    lines_of,
    questions,
    reusing,
    says,
    text_of,
)
from kit.commands.submitting import submit
from kit.commands.support import (
    as_json,
    chat_line,
    queued,
    run_producer,
    state,
    write_lines,
)
from kit.drain.draining import draining, soon

from contract.naming import request_id
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.known import KnownAnswers
from producer import Client
from producer.time_left import Work
from worker.engine.simulated.engine import SimulatedEngine

TEXTS = [f"question {n}" for n in range(1200)]


@pytest.fixture(autouse=True)
def _worker(redis_client: redis.Redis) -> None:
    announce(redis_client)


def counts(store: BatchStore, batch_id: str) -> tuple[int, int, int]:
    """Return (total, completed, cached) of a batch."""
    batch = state(store, batch_id)
    return batch.number("total"), batch.number("completed"), batch.number("cached")


def test_the_same_file_again_is_answered_without_a_request(store: BatchStore, tmp_path: Path):
    # Given a file that was computed
    ask(store, tmp_path / "in", "b1", TEXTS)
    assert len(answer_all(store)) == 1200
    # When it is submitted again
    batch = ask(store, tmp_path / "in", "b2", TEXTS)
    # Then nothing waits, and the batch has ended
    assert queued(store) == []
    assert batch.finished and counts(store, "b2") == (1200, 1200, 1200)
    assert (batch.number("prompt_tokens"), batch.number("valid")) == (0, 1200)
    # And each line has the answer, its own custom_id, and names the request that computed it
    first, again = lines_of(store, "b1"), lines_of(store, "b2")
    assert [line["response"]["body"] for line in again] == [
        line["response"]["body"] for line in first
    ]
    line = again[7]
    assert (line["id"], line["custom_id"]) == (f"batch_req_{request_id('b2', 'r7')}", "r7")
    assert line["warmq"] == {
        "line": 8, "timing": {"engine_s": 1.5}, "reused": True,
        "answered_by": request_id("b1", "r7"),
    }  # fmt: skip
    assert "reused" not in first[7]["warmq"]


def test_exactly_the_changed_lines_are_computed(store: BatchStore, tmp_path: Path):
    ask(store, tmp_path / "in", "b1", TEXTS)
    answer_all(store)
    changed = [f"other {n}" if n % 100 == 3 else text for n, text in enumerate(TEXTS)]
    ask(store, tmp_path / "in", "b2", changed)
    assert answer_all(store) == [text for text in changed if text.startswith("other")]
    assert counts(store, "b2") == (1200, 1200, 1188)
    assert [text_of(line) for line in lines_of(store, "b2")] == [says(text) for text in changed]


def test_a_third_run_is_answered_by_the_second_and_names_the_first(
    store: BatchStore, tmp_path: Path
):
    ask(store, tmp_path / "in", "b1", TEXTS[:3])
    answer_all(store)
    ask(store, tmp_path / "in", "b2", TEXTS[:3])
    store.delete("b1")
    ask(store, tmp_path / "in", "b3", TEXTS[:3])
    assert counts(store, "b3") == (3, 3, 3)
    assert [line["warmq"]["answered_by"] for line in lines_of(store, "b3")] == [
        request_id("b1", f"r{n}") for n in range(3)
    ]


def test_failed_cut_and_deleted_answers_are_computed_again(store: BatchStore, tmp_path: Path):
    fates = {"question 0": "fail", "question 1": "cut"}
    ask(store, tmp_path / "in", "b1", TEXTS[:4])
    answer_all(store, fate=lambda text: fates.get(text, ""))
    ask(store, tmp_path / "in", "b2", TEXTS[:4])
    assert answer_all(store) == TEXTS[:2]
    store.delete("b1", force=True)
    store.delete("b2", force=True)
    ask(store, tmp_path / "in", "b3", TEXTS[:4])
    assert answer_all(store) == TEXTS[:4]
    assert counts(store, "b3") == (4, 4, 0)


def test_a_batch_that_is_being_deleted_answers_nothing(
    store: BatchStore, redis_client: redis.Redis, tmp_path: Path
):
    ask(store, tmp_path / "in", "b1", TEXTS[:2])
    answer_all(store)
    redis_client.hset(keys.batch_key("b1"), "deleting", 1)
    ask(store, tmp_path / "in", "b2", TEXTS[:2])
    assert counts(store, "b2") == (2, 0, 0)


def test_a_batch_that_is_made_again_with_other_lines_does_not_answer_the_old_ones(
    store: BatchStore, tmp_path: Path
):
    # Given a batch whose request ids get other bodies
    ask(store, tmp_path / "in", "b1", ["old"])
    answer_all(store)
    store.delete("b1")
    ask(store, tmp_path / "in", "b1", ["new"])
    answer_all(store)
    # When the old question is asked again
    ask(store, tmp_path / "in", "b2", ["old", "new"])
    # Then it is computed
    assert answer_all(store) == ["old"]
    assert [text_of(line) for line in lines_of(store, "b2")] == [says("old"), says("new")]


def test_a_batch_id_that_another_tenant_takes_over_does_not_share_answers(
    store: BatchStore, tmp_path: Path
):
    # Given an entry that names a request id which is now another tenant's
    ask(store, tmp_path / "in", "b1", ["a"])
    answer_all(store)
    store.delete("b1")
    ask(store, tmp_path / "in", "b1", ["a"], tenant="other")
    answer_all(store, tenant="other")
    # When the first tenant asks again, it is computed
    ask(store, tmp_path / "in", "b2", ["a"])
    assert answer_all(store) == ["a"]


def test_another_tenant_model_or_age_is_not_answered(
    store: BatchStore, redis_client: redis.Redis, tmp_path: Path
):
    ask(store, tmp_path / "in", "b1", TEXTS[:2])
    answer_all(store)
    ask(store, tmp_path / "in", "b2", TEXTS[:2], tenant="other")
    assert answer_all(store, tenant="other") == TEXTS[:2]
    ask(store, tmp_path / "in", "b3", TEXTS[:2], reuse_s=1e-6)
    assert counts(store, "b3") == (2, 0, 0)
    answer_all(store)
    announce(redis_client, "m2")
    ask(store, tmp_path / "in", "b4", TEXTS[:2])
    assert answer_all(store, "m2") == TEXTS[:2]
    assert [text_of(line) for line in lines_of(store, "b4")] == [
        says(text, "m2") for text in TEXTS[:2]
    ]


def test_the_newest_entries_stay_and_those_in_use(
    store: BatchStore, redis_client: redis.Redis, tmp_path: Path
):
    # Given room for 8 answers, of which the first 2 are used again
    announce(redis_client, most=8)
    for n in range(3):
        ask(store, tmp_path / "in", f"b{n}", TEXTS[4 * n : 4 * n + 4])
        answer_all(store, most=8)
        ask(store, tmp_path / "in", f"again{n}", TEXTS[:2])
        answer_all(store, most=8)
    found = KnownAnswers.using(store)
    # Then there are no more than 8, and the used ones are still known
    client = found._client
    sizes = [client.hlen(keys.known_key("default", half)) for half in keys.HALVES]
    assert sum(sizes) <= 8
    assert counts(store, "again2") == (2, 2, 2)
    assert found.forget("default") == sum(sizes)
    ask(store, tmp_path / "in", "b9", TEXTS[:2])
    assert counts(store, "b9") == (2, 0, 0)


def test_lines_in_another_form_are_the_same_question(store: BatchStore, tmp_path: Path):
    ask(store, tmp_path / "in", "b1", TEXTS[:600])
    answer_all(store)
    lines = [
        {"custom_id": f"s{n}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"user": f"u{n}", "temperature": 0, "messages": asked(text)["messages"]}}
        for n, text in enumerate(TEXTS[:600])
    ]  # fmt: skip
    submit(store, write_lines(tmp_path / "in", lines), reusing("b2"))
    assert counts(store, "b2") == (600, 600, 600)


def test_with_dedupe_followers_get_the_known_answer_too(store: BatchStore, tmp_path: Path):
    ask(store, tmp_path / "in", "b1", ["a"])
    answer_all(store)
    path = questions(tmp_path / "in", ["a", "b", "a", "b"])
    submit(store, path, reusing("b2", dedupe=True))
    assert answer_all(store) == ["b"]
    batch = state(store, "b2")
    assert batch.finished and counts(store, "b2") == (4, 4, 1)
    assert batch.number("identical") == 2


def test_bad_lines_between_known_ones_keep_their_errors(store: BatchStore, tmp_path: Path):
    ask(store, tmp_path / "in", "b1", ["a", "b"])
    answer_all(store)
    lines = [
        chat_line("x", "a", temperature=0), b"not JSON", chat_line("y", "b", temperature=9),
        chat_line("x", "b", temperature=0), chat_line("z", "b", temperature=0),
    ]  # fmt: skip
    submit(store, write_lines(tmp_path / "in", lines), reusing("b2"))
    batch = state(store, "b2")
    assert batch.finished
    assert (batch.number("failed"), counts(store, "b2")) == (3, (5, 2, 2))


def test_a_submit_that_is_repeated_reuses_nothing_twice(store: BatchStore, tmp_path: Path):
    ask(store, tmp_path / "in", "b1", TEXTS[:600])
    answer_all(store)
    for _ in range(2):
        ask(store, tmp_path / "in", "b2", TEXTS)
    assert counts(store, "b2") == (1200, 600, 600)
    assert len(answer_all(store)) == 600
    assert counts(store, "b2") == (1200, 1200, 600)


def test_results_that_expired_are_computed_again(
    store: BatchStore, redis_client: redis.Redis, tmp_path: Path
):
    ask(store, tmp_path / "in", "b1", TEXTS[:5])
    answer_all(store)
    redis_client.delete(keys.result_key(request_id("b1", "r2")))
    ask(store, tmp_path / "in", "b2", TEXTS[:5])
    assert answer_all(store) == ["question 2"]
    assert counts(store, "b2") == (5, 5, 4)


def test_the_commands_show_what_is_known(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, tmp_path: Path
):
    def producer(*words: str | Path) -> subprocess.CompletedProcess[str]:
        announce(redis_client)  # it counts for 15 s
        return run_producer(*words, redis_url=redis_url)

    path = questions(tmp_path / "in.jsonl", TEXTS[:5])
    first = producer("submit", "--reuse", path, "--batch-id", "b1")
    assert first.returncode == 0, first.stderr
    answer_all(store)
    questions(path, TEXTS[:8])
    planned = producer("plan", path, "--reuse=7d", "--json")
    assert as_json(planned)["request_counts"]["known"] == 5
    planned = producer("plan", "--reuse", path)
    assert "up to 5 of 8 are known" in planned.stdout
    again = producer("submit", path, "--batch-id", "b2", "--reuse=7d")
    assert "5 of them answered by known answers" in again.stderr
    shown = as_json(producer("status", "b2", "--json"))
    assert (shown["request_counts"]["cached"], shown["request_counts"]["completed"]) == (5, 5)
    store.delete("b1", force=True)
    store.delete("b2", force=True)
    planned = producer("plan", path, "--reuse", "--json")
    assert as_json(planned)["request_counts"]["known"] == 0
    computed = producer("submit", path, "--batch-id", "b3", "--reuse")
    assert "0 of them answered by known answers" in computed.stderr
    store.delete("b3", force=True)
    ask(store, tmp_path / "again", "b4", TEXTS[:5])
    answer_all(store)
    forgotten = producer("tenant", "forget-answers", "default")
    assert "5 known answers forgotten" in forgotten.stderr
    wrong = producer("submit", path, "--reuse", "--order", "prefix")
    assert wrong.returncode == 2


def test_the_client_counts_them(redis_url: str, store: BatchStore):
    with Client(redis_url) as client:
        for cached in (0, 2):
            batch = client.submit([asked("a"), asked("b")], reuse="1d")
            answer_all(store)
            assert batch.wait(5).cached == cached


@pytest.mark.asyncio
async def test_a_worker_notes_what_it_answers(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, tmp_path: Path
):
    redis_client.delete(keys.WORKERS)
    log = tmp_path / "log"
    engine = partial(SimulatedEngine, log=log)
    async with draining(redis_url, engine, known_answers=100) as running:  # type: ignore[arg-type]
        await soon(lambda: KnownAnswers.using(store).offer("warmq"))
        ask(store, tmp_path / "in", "b1", TEXTS[:20])
        await soon(lambda: state(store, "b1").finished)
        assert running.drain.offers is not None
        await soon(lambda: redis_client.hlen(keys.known_key("default", "new")) == 20)
        computed = log.read_text().count("start")
        ask(store, tmp_path / "in", "b2", TEXTS[:20])
        assert counts(store, "b2") == (20, 20, 20)
        assert log.read_text().count("start") == computed == 20


def test_an_answer_with_the_text_of_a_results_end_keeps_its_bytes(
    store: BatchStore, redis_client: redis.Redis, tmp_path: Path
):
    # Given a long answer that has, as JSON and as text, what follows an answer in a result
    ask(store, tmp_path / "in", "b1", ["a"])
    answer_all(store)
    key = keys.result_key(request_id("b1", "r0"))
    raw = redis_client.get(key)
    assert raw is not None
    end = b'{"traceback":null,"children":[],"date_done":"x","task_id":"y"}'
    more = b'"more":[{"a":1,%s,%s,"%s"],' % (end[1:], orjson.dumps(end.decode()), b"x" * 2**20)
    long = raw.replace(b'"result":{', b'"result":{' + more)
    redis_client.set(key, long)
    # When it is reused
    ask(store, tmp_path / "in", "b2", ["a"])
    # Then its JSON is the same
    assert lines_of(store, "b2")[0]["response"]["body"] == orjson.loads(long)["result"]


def test_the_estimate_counts_only_what_is_computed(store: BatchStore, tmp_path: Path):
    ask(store, tmp_path / "in", "b1", TEXTS[:10])
    whole = state(store, "b1").expected
    assert whole is not None
    answer_all(store)
    ask(store, tmp_path / "in", "b2", TEXTS[:10])
    assert state(store, "b2").expected == {
        "prompt_tokens": 0, "completion_tokens": 0, "seconds": 0.0
    }  # fmt: skip
    ask(store, tmp_path / "in", "b3", [*TEXTS[:5], *(f"{text}?" for text in TEXTS[:5])])
    half = state(store, "b3").expected
    assert half is not None
    assert half["prompt_tokens"] == pytest.approx(whole["prompt_tokens"] / 2, abs=5)


def test_the_estimate_counts_lines_with_the_same_body_once(store: BatchStore, tmp_path: Path):
    path = questions(tmp_path / "in", ["a"] * 10)
    submit(store, path, reusing("b1", reuse_s=None, dedupe=False))
    submit(store, path, reusing("b2", reuse_s=None, dedupe=True))
    whole, once = state(store, "b1").expected, state(store, "b2").expected
    assert whole is not None and once is not None
    assert 10 * once["prompt_tokens"] == whole["prompt_tokens"]


def test_the_time_left_counts_the_tokens_of_computed_answers(store: BatchStore, tmp_path: Path):
    ask(store, tmp_path / "in", "b1", TEXTS[:10])
    answer_all(store)
    ask(store, tmp_path / "in", "b2", TEXTS[:11])
    answer_all(store)
    work = Work.of(state(store, "b2"))
    assert (work.done, work.tokens) == (1, 5)


def test_a_run_says_how_many_answers_were_known(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, tmp_path: Path
):
    ask(store, tmp_path / "in", "b1", TEXTS[:1100])
    answer_all(store)
    path = questions(tmp_path / "in.jsonl", TEXTS[:1100])
    announce(redis_client)
    out = tmp_path / "out.jsonl"
    done = run_producer("run", path, out, "--reuse", "--window", "500", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert "1100 results (1100 known answers), 0 failed" in done.stderr
    (run,) = [one.id for one in store.batches() if one.is_run]
    shown = as_json(run_producer("status", run, "--json", redis_url=redis_url))
    assert shown["request_counts"]["cached"] == 1100
    assert "1100 cached" in run_producer("status", run, redis_url=redis_url).stdout
