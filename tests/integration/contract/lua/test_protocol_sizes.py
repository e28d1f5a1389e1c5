"""Large messages and results: what one script moves is bounded, what Redis refuses ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from kit.drain.draining import draining, error_of, send, soon
from kit.protocol import script_keys
from kit.protocol.lessee import (
    QUEUE,
    Lessee,
    celery_message,
    chat,
    counts,
    now,
    queued_ids,
    stored,
    submit_batch,
)

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from worker.engine import Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine

MB = 1_000_000
#: What one script may move, and one message more.
BOUND = 4 * 2**20 + 2 * MB


def large(count: int) -> list[dict]:
    """Return bodies of 1 MB that differ in their last bytes only, as with a shared image."""
    return [chat("x" * MB + f"{n:06d}") for n in range(count)]


def lua_peak(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory_lua"])


@pytest.fixture(autouse=True)
def lazy_collector(redis_client: redis.Redis) -> Iterator[None]:
    """Leave garbage where it is: what a script collects in time must not depend on others."""
    redis_client.eval("collectgarbage() collectgarbage('setpause', 10000)", 0)
    yield
    redis_client.eval("collectgarbage('setpause', 200) collectgarbage()", 0)


@pytest.fixture
def handed_out(worker: Lessee, store: BatchStore) -> Iterator[list]:
    submit_batch(store, bodies=large(20))
    leases: list = []
    while len(leases) < 20:
        leases += worker.pop(20, max_bytes=4 * 2**20)
    return leases


def test_a_lease_holds_no_copy_of_its_message(
    worker: Lessee, redis_client: redis.Redis, handed_out: list
) -> None:
    record = redis_client.hget(script_keys.worker_key("w1"), handed_out[0].id)
    assert len(record) < 200
    assert redis_client.lrange(script_keys.leased_key(handed_out[0].id), 0, -1) == [
        handed_out[0].message
    ]


def test_release_moves_large_messages_a_few_at_a_time_in_their_old_order(
    worker: Lessee, redis_client: redis.Redis, handed_out: list
) -> None:
    pairs = [part for lease in reversed(handed_out) for part in (lease.id, 0)]
    count, left = worker.run("release", "w1", 2, 60_000, "", *pairs)
    assert (count, left) == (20, 1)
    lists = naming.turn_list(QUEUE, 6, "default", "b1")
    assert 1 <= redis_client.llen(lists) <= BOUND // MB
    assert lua_peak(redis_client) < 2 * BOUND
    # What waits to be moved is nobody's lease any more
    assert worker.renew(handed_out[0].id) == ([handed_out[0].id], [])
    while left:
        _, left = worker.run("release", "w1", 2, 60_000, "")
    assert queued_ids(redis_client, lists) == [lease.request_id for lease in handed_out]
    assert redis_client.zcard(keys.LEASES) == 0


def test_sweep_moves_large_messages_a_few_at_a_time_in_their_old_order(
    worker: Lessee, other: Lessee, redis_client: redis.Redis, handed_out: list
) -> None:
    other.expire_leases(*handed_out)
    assert other.sweep() == 20
    lists = naming.turn_list(QUEUE, 6, "default", "b1")
    assert 1 <= redis_client.llen(lists) <= BOUND // MB
    while redis_client.zcard(keys.LEASES):
        assert other.sweep() == 0
    assert queued_ids(redis_client, lists) == [lease.request_id for lease in handed_out]
    assert set(redis_client.hvals(keys.DEATHS)) == {b"1"}  # each once


def test_a_completed_request_on_its_way_back_is_not_queued_again(
    worker: Lessee, other: Lessee, redis_client: redis.Redis, store: BatchStore, handed_out: list
) -> None:
    other.expire_leases(*handed_out)
    other.sweep()
    assert worker.done(*handed_out) == 20
    while other.sweep():
        continue
    assert other.pop() == []
    assert now(store).finished
    assert redis_client.keys("warmq:leased:*") == []


def test_failed_large_requests_are_kept_and_retried_without_their_text_passing_through_lua(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore, handed_out: list
) -> None:
    worker.done(*handed_out, outcome="failed", keep=True)
    assert lua_peak(redis_client) < 2 * BOUND
    assert store.retry(now(store), ["failed"]) == 20
    assert lua_peak(redis_client) < 3 * BOUND
    assert counts(now(store)) == {}


@pytest.mark.parametrize("space", ["", " "], ids=["as producer writes", "as kombu writes"])
def test_only_what_follows_the_body_is_decoded_and_a_body_cannot_pretend_to_end(
    worker: Lessee, redis_client: redis.Redis, space: str
) -> None:
    tricky = '\\","content-encoding":"x","headers":{"id":"evil"},"\\\\'
    message = celery_message("good", chat(tricky)).decode()
    redis_client.lpush(QUEUE, message.replace('{"body":', f'{{"body":{space}'))
    assert [lease.request_id for lease in worker.pop()] == ["good"]


# -- what Redis refuses ----------------------------------------------------------------------


class Verbose(SimulatedEngine):
    """Answers with as many bytes as the request's `n` says, in MB; usage as it likes."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if size := request.body.get("n", 0):
            return Completion(b'{"text":"' + b"x" * (size * 2**20) + b'"}', 1, 1)
        tokens = int(request.body.get("user", 1))
        return Completion(b'{"text":"short"}', tokens, tokens)


async def test_a_result_larger_than_redis_takes_is_its_requests_own_error(
    redis_client: redis.Redis, redis_url: str
) -> None:
    redis_client.config_set("proto-max-bulk-len", 2 * 2**20)
    ids = send(redis_client, chat(n=1), chat(n=3), chat())
    try:
        async with draining(redis_url, Verbose) as running:
            for rid in ids:
                await soon(lambda rid=rid: stored(redis_client, rid), what=rid)
            await soon(lambda: not running.drain.in_flight)
    finally:
        redis_client.config_set("proto-max-bulk-len", 512 * 2**20)
    error = error_of(redis_client, ids[1])
    assert error["code"] == "result_too_large"
    assert str(2 * 2**20) in error["message"]
    assert stored(redis_client, ids[0])["status"] == "SUCCESS"
    assert stored(redis_client, ids[2])["status"] == "SUCCESS"


async def test_a_result_on_which_redis_cuts_the_connection_ends_too(
    redis_client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose user may not ask for the limit meets it."""

    async def usual(_: object) -> int:
        return 512 * 2**20

    monkeypatch.setattr("worker.drain.scripts.Scripts.max_bytes", usual)
    redis_client.config_set("proto-max-bulk-len", 2 * 2**20)
    ids = send(redis_client, chat(n=3), chat())
    try:
        async with draining(redis_url, Verbose) as running:
            for rid in ids:
                await soon(lambda rid=rid: stored(redis_client, rid), what=rid)
            await soon(lambda: not running.drain.in_flight)
    finally:
        redis_client.config_set("proto-max-bulk-len", 512 * 2**20)
    assert error_of(redis_client, ids[0])["code"] == "result_refused"
    assert stored(redis_client, ids[1])["status"] == "SUCCESS"


@pytest.mark.parametrize("tokens", [2**63, 2**80])
async def test_an_absurd_token_count_ends_its_request_and_the_batch(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, tokens: int
) -> None:
    submit_batch(store, bodies=[chat(user=str(tokens)), chat()])
    async with draining(redis_url, Verbose):
        await soon(lambda: now(store).finished)
    assert counts(now(store)) == {"completed": 2}
    assert 0 < now(store).number("prompt_tokens") < 2**63


def test_a_done_that_fails_half_way_counts_what_it_wrote_and_is_ended_by_the_next(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submit_batch(store, 3)
    first, second, third = worker.pop()
    redis_client.delete(
        script_keys.leased_key(second.id)
    )  # Redis lost the message that is to be kept
    with pytest.raises(redis.ResponseError):
        worker.done(first, second, third, outcome="failed", keep=True)
    assert counts(now(store)) == {"failed": 2}
    assert redis_client.zscore(keys.LEASES, first.id) is None
    assert worker.done(first, second, third, outcome="failed", keep=True) == 1
    assert counts(now(store)) == {"failed": 3}
    assert now(store).finished
    assert redis_client.zcard(keys.LEASES) == 0
    assert store.finished_ids("b1", 0, 9) == [x.request_id for x in (first, second, third)]
