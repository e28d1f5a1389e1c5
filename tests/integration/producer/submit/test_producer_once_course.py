"""`submit --dedupe` over a batch: resumed, followed, expired, run in windows, at random."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.commands.once import (
    ASKED,
    ONCE,
    collect,
    counts,
    custom_ids,
    greedy,
    number,
    outcome,
    six_lines,
    waiting,
)
from kit.commands.runs import running
from kit.commands.submitting import ONCE as WITHOUT
from kit.commands.submitting import submit
from kit.commands.support import (
    as_json,
    finish,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.drain.draining import draining, soon
from kit.protocol.lessee import Lease, Lessee, client_of

from contract import naming
from contract.errors import BatchConflict, RequestFailed
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.results import OUTCOMES
from demo.stack import eventually
from producer.collect.collect import Collector
from producer.input import reader
from producer.input.reader import RawChunk
from producer.submit.submission import Submission


def test_the_deadline_of_a_leader_is_that_of_its_followers(store: BatchStore, tmp_path: Path):
    submit(
        store, six_lines(tmp_path / "in"), Submission("b1", "warmq", 6, dedupe=True, deadline="1")
    )
    assert Lessee(client_of(store)).pop() == []
    assert state(store, "b1").status == "expired"
    assert {outcome(line) for line in collect(store, "completion")} == {"expired"}


def test_a_resumed_submit_finds_the_leaders_of_the_lines_before_it(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reader, "CHUNK_LINES", 2)
    path = write_lines(
        tmp_path / "in",
        [greedy("a", "one"), b"{", greedy("a", "two"), greedy("b", "two"), greedy("c", "one"),
         greedy(None, "three"), greedy("d", "three"), greedy("e", "two"), greedy("f", "one")],
    )  # fmt: skip

    class StoppedError(Exception):
        pass

    def stop_after(count: int) -> Any:
        def watch(chunks: Iterator[RawChunk]) -> Iterator[RawChunk]:
            for chunk in chunks:
                if chunk.ordinal == count:
                    raise StoppedError
                yield chunk

        return watch

    for count in range(1, 5):
        with pytest.raises(StoppedError):
            submit(store, path, ONCE, watch=stop_after(count))
    submit(store, path, ONCE)
    entries = [entry for chunk in store.index("b1") for entry in chunk.entries]
    submit(store, path, Submission("b2", "warmq.other", 6, dedupe=True))
    leaders = {entry[1]: entry[3] if len(entry) == 4 else "" for entry in entries}
    first, second = naming.request_id("b1", "a"), naming.request_id("b1", "b")
    third = naming.line_request_id("b1", 6)
    assert [leaders[n] for n in ("c", "d", "e", "f")] == [first, third, second, first]
    whole = [entry[:3] for chunk in store.index("b2") for entry in chunk.entries]
    assert whole == [entry[:3] for entry in entries]
    assert waiting(store) == ["a", "b", "line-6"]
    run_all(store)
    assert [outcome(line) for line in collect(store)].count("failed") == 2


def test_a_batch_is_resumed_with_the_same_option_only(store: BatchStore, tmp_path: Path):
    path = six_lines(tmp_path / "in")
    submit(store, path, ONCE)
    with pytest.raises(BatchConflict, match="other options"):
        submit(store, path, WITHOUT)


def test_the_old_name_of_the_option_works_and_prints_the_new_one(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    path = six_lines(tmp_path / "in")
    done = run_producer("submit", path, "--batch-id", "b1", "--once", redis_url=redis_url)
    assert "--once is now --dedupe" in done.stderr
    assert state(store, "b1").number("identical") == 3


def test_commands_count_every_line_and_name_the_line_that_answers(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    path = six_lines(tmp_path / "in")
    done = run_producer("submit", path, "--batch-id", "b1", "--dedupe", redis_url=redis_url)
    assert "--once" not in done.stderr
    assert "6 requests queued" in done.stderr
    assert "3 of them answered by an earlier line with the same body" in done.stderr
    shown = as_json(run_producer("status", "b1", "--request", "f", "--json", redis_url=redis_url))
    assert (shown["same_as"], shown["status"], shown["line"]) == ("a", "in_progress", 6)
    assert shown["request_id"] == naming.request_id("b1", "a")
    run_all(store)
    shown = as_json(run_producer("status", "b1", "--request", "f", "--json", redis_url=redis_url))
    assert shown["result"]["custom_id"] == "f"
    assert shown["result"]["warmq"]["same_as"] == "a"
    batch = as_json(run_producer("status", "b1", "--json", redis_url=redis_url))
    assert batch["request_counts"] == {
        "total": 6, "completed": 6, "failed": 0, "cancelled": 0, "expired": 0, "in_progress": 0,
        "identical": 3,
    }  # fmt: skip
    assert batch["usage"]["total_tokens"] == 3 * 5
    assert (
        "6 total, 6 completed, 3 identical"
        in run_producer("status", "b1", redis_url=redis_url).stdout
    )
    out = tmp_path / "out.jsonl"
    assert run_producer("results", "b1", "-o", out, redis_url=redis_url).returncode == 0
    assert run_producer("results", "b1", "-o", out, redis_url=redis_url).returncode == 0
    assert len(out.read_bytes().splitlines()) == 6
    run_producer("delete", "b1", redis_url=redis_url)
    assert list(client_of(store).scan_iter("warmq:batch:*")) == []


@pytest.mark.asyncio
async def test_what_is_kept_of_followers_expires_with_the_batch_and_a_retry_keeps_it(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    lines = [greedy("a", "one", user="simulate:fail"), greedy("b", "one"), greedy("c", "two")]
    submit(store, write_lines(tmp_path / "in", lines), ONCE)
    client, key = client_of(store), keys.batch_key("b1", "identical")
    async with draining(redis_url):
        await soon(lambda: client.pttl(key) > 0)
    assert counts(store)["failed"] == 2
    assert store.retry(state(store, "b1"), ["failed"]) == 2
    assert client.pttl(key) == -1
    run_all(store)
    assert counts(store)["completed"] == 3


@pytest.mark.parametrize("order", ["input", "completion"])
def test_results_are_followed_while_the_file_is_still_submitted(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
):
    # Given a batch of which nothing is there yet but its name
    monkeypatch.setattr(reader, "CHUNK_LINES", 2)
    path = six_lines(tmp_path / "in")
    found: list[dict[str, Any]] = []
    following = Collector(
        store, ONCE.create(store, "in"), follow=True, sleep=lambda _: time.sleep(0.001)
    )
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(
            lambda: found.extend(orjson.loads(line.json) for line in following.lines(order))
        )

        # When after each chunk the reader has all there is, and then the next one comes
        def watch(chunks: Iterator[RawChunk]) -> Iterator[RawChunk]:
            for count, chunk in enumerate(chunks):
                eventually(lambda at=2 * count: run_all(store) >= 0 and len(found) >= at)
                yield chunk

        submit(store, path, ONCE, watch=watch)
        run_all(store)
        reading.result(30)
    # Then it has each line once, the late followers too
    assert sorted(custom_ids(found)) == sorted(ASKED)
    assert [line["warmq"].get("same_as") for line in sorted(found, key=number)] == [
        None, None, "a", "b", None, "a"
    ]  # fmt: skip


def test_the_text_of_a_follower_is_its_leaders(redis_url: str, store: BatchStore, tmp_path: Path):
    submit(store, six_lines(tmp_path / "in"), ONCE)
    run_all(store)
    told = run_producer("watch", "b1", "--request", "f", "--stream", redis_url=redis_url)
    assert told.stdout == "answer to a\n"


def test_a_run_answers_the_same_lines_of_a_window_once(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [f"q{n}" for n in range(1000)]
    write_lines(source, (greedy(name, str(n % 7)) for n, name in enumerate(names)))
    answered = 0
    with running(redis_url, source, out, "--dedupe", "--window", "500") as process:

        def served() -> bool:
            nonlocal answered
            answered += run_all(store)
            return process.poll() is not None

        eventually(served, 40)
    assert answered == 2 * 7
    lines = [orjson.loads(line) for line in out.read_bytes().splitlines()]
    assert custom_ids(lines) == names
    assert sum("same_as" in line["warmq"] for line in lines) == 1000 - answered


class Scene:
    """A worker and a user who do something at random while a file is submitted, and after."""

    def __init__(self, store: BatchStore, names: list[str], chance: random.Random) -> None:
        self.store, self.names, self.chance = store, names, chance
        self.lessee = Lessee(client_of(store))
        self.leases: list[Lease] = []

    def something(self) -> None:
        batch, chance = self.store.batch("b1"), self.chance
        assert batch is not None
        match chance.randrange(5):
            case 0 | 1:
                self.leases += self.lessee.pop(chance.randrange(4))
            case 2 if self.leases:
                lease = self.leases.pop(chance.randrange(len(self.leases)))
                finish(self.lessee, [lease], chance.choice([None, None, RequestFailed("no")]))
            case 3:
                with suppress(BatchConflict):  # a follower, or not submitted yet
                    self.store.cancel_request(batch, chance.choice(self.names))
            case 4:
                outcomes = ("failed", "cancelled")
                self.store.retry(batch, chance.sample(outcomes, chance.randrange(3)))

    def between_chunks(self, chunks: Iterator[RawChunk]) -> Iterator[RawChunk]:
        cursor = 0
        for chunk in chunks:
            # What was given before is in Redis: so the same draws find the same state.
            eventually(lambda at=cursor: state(self.store, "b1").number("cursor") == at)
            cursor = chunk.cursor
            for _ in range(self.chance.randrange(5)):
                self.something()
            yield chunk

    def check_counters(self, lines: list[dict[str, Any]]) -> None:
        found, batch = Counter(map(outcome, lines)), state(self.store, "b1")
        assert [batch.number(name) for name in OUTCOMES] == [found[name] for name in OUTCOMES]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.randoms(use_true_random=False))
def test_whatever_happens_each_line_has_one_outcome_and_the_counters_are_those(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chance: random.Random
):
    client_of(store).flushall()
    monkeypatch.setattr(reader, "CHUNK_LINES", 3)
    names = [f"q{n}" for n in range(chance.randrange(1, 25))]
    asked = {name: str(chance.randrange(6)) for name in names}
    path = write_lines(tmp_path / "in", (greedy(name, asked[name]) for name in names))
    scene = Scene(store, names, chance)

    submit(store, path, ONCE, watch=scene.between_chunks)
    for _ in range(chance.randrange(9)):
        scene.something()
        for order in ("input", "completion"):
            scene.check_counters(collect(store, order, partial=True))
    if chance.randrange(3) == 0:
        store.cancel(state(store, "b1"))
    run_all(store)
    finish(scene.lessee, scene.leases)
    run_all(store)

    assert state(store, "b1").finished
    for order in ("input", "completion"):
        lines = collect(store, order)
        assert sorted(custom_ids(lines)) == sorted(names)
        scene.check_counters(lines)
        for line in lines:
            same = (line.get("warmq") or line["error"]).get("same_as")
            assert same is None or asked[same] == asked[line["custom_id"]]
