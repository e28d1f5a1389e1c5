"""`producer plan` beside a real Redis and a worker that announces what it has measured."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from kit.commands import doctor_findings
from kit.commands.support import (
    as_json,
    batch_file,
    chat_line,
    finish,
    run_all,
    run_producer,
    write_lines,
)
from kit.drain.draining import Draining, draining, soon
from kit.protocol.lessee import Lessee, now, submit_batch
from kit.stacks.older_worker import announce

from contract.redis.batches import BatchStore
from contract.redis.history import HistoryReads
from contract.redis.tenants import Tenant, Tenants
from contract.version import PROTOCOL
from worker.engine import Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine, _answer

SLOTS = 8
#: Seconds of a prompt token, and of a token of the answer, with full slots.
PROMPT_S, TOKEN_S = 20e-6, 200e-6


class RatedEngine(SimulatedEngine):
    """Takes as long as a request's tokens take, and counts them: 4 characters are one."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        text = request.body["messages"][0]["content"]
        prompt, written = len(text) // 4 + 5, int(request.body["max_tokens"])
        await self._free.take(request.priority)
        try:
            await asyncio.sleep(SLOTS * (prompt * PROMPT_S + written * TOKEN_S))
        finally:
            self._free.give()
        return Completion(_answer(request, request_id).body, prompt, written)


def lines(count: int, characters: int, answer: int, prefix: str) -> list[dict[str, Any]]:
    return [
        chat_line(f"{prefix}{n}", f"{prefix}{n} ".ljust(characters, "x"), max_tokens=answer,
                  ignore_eos=True)
        for n in range(count)
    ]  # fmt: skip


async def producer(running: Draining, *args: str | Path) -> Any:
    """Run a command beside the drain; return its JSON."""
    url = running.settings.redis_url.get_secret_value()
    return as_json(await asyncio.to_thread(run_producer, *args, "--json", redis_url=url))


async def test_a_plan_tells_time_from_what_the_workers_did_in_their_last_minutes(
    redis_url: str, store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = write_lines(tmp_path / "warm.jsonl", lines(300, 400, 40, "s") + lines(300, 4000, 5, "l"))
    file = write_lines(tmp_path / "file.jsonl", lines(400, 2000, 20, "f"))
    monkeypatch.setattr("worker.drain.progress.WRITE_S", 1.0)
    async with draining(redis_url, RatedEngine, simulated_slots=SLOTS) as running:
        before = await producer(running, "plan", file)
        submitted = asyncio.to_thread(run_producer, "submit", warm, redis_url=redis_url)
        assert (await submitted).returncode == 0
        await soon(lambda: all(b.finished for b in store.batches()), 60)
        ring = HistoryReads.using(store)
        await soon(lambda: sum(m.completed for m in ring.day(["warmq"])) == 600, 30, "is written")
        await soon(lambda: store.workers("warmq")[0].get("mean_answer"), 30, "that is announced")
        planned = await producer(running, "plan", file)
        Tenants.using(store).set_tenant(Tenant("lab", max_in_flight=1))
        capped = await producer(running, "plan", file, "--tenant", "lab")
        done = await asyncio.to_thread(
            run_producer, "submit", file, "--wait", "--json", redis_url=redis_url
        )
    batch = orjson.loads(done.stdout.splitlines()[-1])
    assert (before["workers"], before["duration"]) == (1, None)
    assert planned["completion_tokens"]["expected"] == batch["usage"]["completion_tokens"] == 8000
    assert capped["duration"]["seconds"] > 4 * planned["duration"]["seconds"]
    tokens = planned["prompt_tokens"]["total"] + 8000
    found = planned["duration"]
    assert found["seconds"] == pytest.approx(tokens / found["tokens_per_s"], rel=0.05)
    # Not beside the clock: what the engine was told to take, which a busy machine only exceeds.
    warm_s = (300 * 105 + 300 * 1005) * PROMPT_S + 300 * 45 * TOKEN_S
    assert found["tokens_per_s"] < 1.5 * (300 * 1110 + 300 * 45) / warm_s
    assert batch["expected"]["seconds"] is not None
    assert batch["expected"]["completion_tokens"] > 0
    assert batch["seconds"] > 0


def test_a_plan_queues_nothing_and_writes_nothing(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    done = run_producer("plan", batch_file(tmp_path / "in.jsonl", 30), redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert "30" in done.stdout
    assert "no worker" in done.stdout
    assert redis_client.keys("*") == []


def test_a_plan_needs_no_redis(tmp_path: Path) -> None:
    file = batch_file(tmp_path / "in.jsonl", 3)
    done = run_producer("plan", file, "--json", redis_url="redis://127.0.0.1:1/0")
    planned = as_json(done)
    assert planned["request_counts"]["valid"] == 3
    assert (planned["workers"], planned["duration"]) == (0, None)
    assert "without the workers" in done.stderr


def test_bad_lines_set_the_exit_status(redis_url: str, tmp_path: Path) -> None:
    some = write_lines(tmp_path / "some.jsonl", [chat_line("a"), b"bad"])
    all_ = write_lines(tmp_path / "all.jsonl", [b'{"bad"'] * 12)
    found = run_producer("plan", some, redis_url=redis_url)
    assert found.returncode == 1
    assert "bad: line 2, not valid JSON" in found.stdout
    found = run_producer("plan", all_, redis_url=redis_url)
    assert found.returncode == 2
    assert "bad: 2 more" in found.stdout


def test_a_model_without_tokenizer_is_refused_by_name(redis_url: str, tmp_path: Path) -> None:
    file = batch_file(tmp_path / "in.jsonl", 3)
    done = run_producer("plan", file, "--tokenizer", tmp_path, redis_url=redis_url)
    assert done.returncode == 2
    assert f"can be read in {tmp_path}" in done.stderr
    assert "--estimate" in done.stderr


@pytest.mark.parametrize("count", [3, 4000])
@pytest.mark.parametrize("limit", [{}, {"max_tokens": 4}])
def test_submit_stores_the_estimate_of_plan(
    redis_url: str, store: BatchStore, tmp_path: Path, count: int, limit: dict[str, int]
) -> None:
    doctor_findings.announce(store, mean_answer=10)
    rows = [chat_line(f"r{n}", "ab " * (n % 61), **limit) for n in range(count)]
    file = write_lines(tmp_path / "in.jsonl", rows)
    planned = as_json(run_producer("plan", file, "--estimate", "--json", redis_url=redis_url))
    run_producer("submit", file, "--batch-id", "b1", redis_url=redis_url)
    found = now(store).expected
    assert found is not None
    near = pytest.approx(planned["prompt_tokens"]["total"], rel=0 if count == 3 else 0.1)
    assert found["prompt_tokens"] == near
    assert found["completion_tokens"] == planned["completion_tokens"]["expected"]
    assert found["completion_tokens"] == count * (4 if limit else 10)


def test_status_shows_what_was_expected_beside_what_came(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 10)
    run_producer("submit", file, "--batch-id", "b1", redis_url=redis_url)
    run_all(store)
    batch = as_json(run_producer("status", "b1", "--json", redis_url=redis_url))
    assert batch["expected"]["prompt_tokens"] > 0
    assert (batch["expected"]["completion_tokens"], batch["expected"]["seconds"]) == (None, None)
    assert batch["seconds"] is not None
    text = run_producer("status", "b1", redis_url=redis_url).stdout
    assert f"about {batch['expected']['prompt_tokens']} prompt" in text
    assert "took" in text


@pytest.mark.parametrize("command", [("status", "b1"), ("top", "--once")])
def test_the_time_left_of_a_running_batch_is_told_by_what_its_queue_did(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, command: tuple[str, ...]
) -> None:
    submit_batch(store, 12)
    lessee = Lessee(redis_client, "celery@a.1.x")
    finish(lessee, lessee.pop()[:2])  # of 5 tokens each
    announce(redis_client, "celery@a.1.x", ahead_s=14, slots=2, protocol=PROTOCOL)
    minute = store.now_ms() // 60_000 - 1  # two slots, a token a second each
    redis_client.hset("warmq:ring:warmq", str(minute % 1440), f"{minute} 12 0 60 60 0 120 120")
    told = run_producer(*command, redis_url=redis_url)
    assert told.returncode == 0, told.stderr
    assert "0:00:25" in told.stdout  # 50 tokens, by 2 a second


@pytest.mark.parametrize("command", [("status", "b1"), ("top", "--once")])
def test_a_batch_that_takes_turns_with_another_one_is_told_a_longer_time(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, command: tuple[str, ...]
) -> None:
    submit_batch(store, 12)
    lessee = Lessee(redis_client, "celery@a.1.x")
    finish(lessee, lessee.pop()[:2])  # of 5 tokens each
    submit_batch(store, 500, batch_id="b2")
    announce(redis_client, "celery@a.1.x", ahead_s=14, slots=2, protocol=PROTOCOL)
    minute = store.now_ms() // 60_000 - 1  # two slots, a token a second each, 10 a request
    redis_client.hset("warmq:ring:warmq", str(minute % 1440), f"{minute} 12 0 60 60 0 120 120")
    told = run_producer(*command, redis_url=redis_url)
    assert "0:01:15" in told.stdout  # 50 tokens, and 10 requests of 10 each, by 2 a second


def test_a_plan_counts_what_waits_before_it(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, tmp_path: Path
) -> None:
    announce(redis_client, "celery@a.1.x", slots=2, protocol=PROTOCOL)
    minute = store.now_ms() // 60_000 - 1
    redis_client.hset("warmq:ring:warmq", str(minute % 1440), f"{minute} 12 0 60 60 0 120 120")
    file = batch_file(tmp_path / "in.jsonl", 10)
    alone = as_json(run_producer("plan", file, "--estimate", "--json", redis_url=redis_url))
    submit_batch(store, 7, batch_id="urgent", priority=0)
    submit_batch(store, 500, batch_id="usual")
    submit_batch(store, 500, batch_id="idle", priority=9)
    found = as_json(run_producer("plan", file, "--estimate", "--json", redis_url=redis_url))
    assert alone["duration"]["requests_before"] == 0
    assert found["duration"]["requests_before"] == 17
    longer_s = found["duration"]["seconds"] - alone["duration"]["seconds"]
    assert longer_s == pytest.approx(17 * 10 / 2, abs=1)
    announce(redis_client, "celery@a.1.x", slots=2, protocol=PROTOCOL)  # 15 s may have passed
    told = run_producer("plan", file, "--estimate", redis_url=redis_url)
    assert "with 17 requests of other batches before" in told.stdout


def used(client: redis.Redis) -> int:
    """Return the bytes that Redis uses, without the buffers of its clients."""
    memory = client.info("memory")
    return int(memory["used_memory"] - memory["mem_clients_normal"])


@pytest.mark.parametrize("characters", [50, 2000])
def test_redis_takes_about_the_bytes_that_were_planned(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, tmp_path: Path, characters: int
) -> None:
    count = 4000
    file = write_lines(tmp_path / "in.jsonl", lines(count, characters, 2, "r"))
    planned = as_json(run_producer("plan", file, "--json", redis_url=redis_url))["redis_bytes"]
    empty = used(redis_client)
    run_producer("submit", file, "--batch-id", "b1", redis_url=redis_url)
    waiting = used(redis_client) - empty
    assert planned["waiting"] == pytest.approx(waiting, rel=0.1)
    run_all(store, text="x" * 50)
    assert used(redis_client) - empty < 1.1 * planned["most"]


def test_a_plan_shows_what_a_deadline_needs(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 1000)

    def planned(deadline: str) -> Any:
        announce(redis_client, "celery@a.1.x", slots=2, protocol=PROTOCOL)  # it lives for 15 s
        options = ("--estimate", "--json", "--deadline", deadline)
        return as_json(run_producer("plan", file, *options, redis_url=redis_url))

    assert planned("2h")["deadline"] is None  # the rate is not known
    minute = store.now_ms() // 60_000 - 1  # two slots, a token a second each
    redis_client.hset("warmq:ring:warmq", str(minute % 1440), f"{minute} 12 0 60 60 0 120 120")
    late_s = planned("1d")["duration"]["seconds"] / 4
    found = planned(f"{late_s + 1:.0f}s")["deadline"]
    assert (found["met"], found["slots"], found["workers"]) == (False, 8, 4)
    assert found["tokens_per_s"] == pytest.approx(8, rel=0.02)
    assert planned("3d")["deadline"]["met"]
    assert planned("1s")["deadline"]["slots"] is None  # one request takes longer
    told = run_producer("plan", file, "--estimate", "--deadline", "08:00", redis_url=redis_url)
    assert "deadline" in told.stdout
    assert told.returncode == 0
    wrong = run_producer("plan", file, "--deadline", "8 o'clock", redis_url=redis_url)
    assert (wrong.returncode, "--deadline" in wrong.stderr) == (2, True)
