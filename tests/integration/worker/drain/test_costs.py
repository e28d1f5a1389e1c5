"""What a request costs, in counts that no other load on the machine changes.

A guard for docs/explanation/performance.md: these bounds are a tenth or so above what was counted
when they were written. Who raises one says why in its commit, and runs `make bench`. Instructions
are not counted: that takes valgrind, which no other test needs.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
from collections.abc import Callable

import orjson
import redis
from kit.drain.draining import draining, soon
from kit.protocol.lessee import chat, now, submit_batch

from contract.message import MessageWriter, read_delivery
from contract.openai.body import CHAT_URL
from contract.openai.lines import parse_line
from contract.redis.batches import BatchStore
from contract.results import ResultLine
from producer.collect.collect import Collector

REQUESTS = 2_000


def calls_per(times: int, work: Callable[[], object]) -> float:
    """Return how many function calls, Python's and C's, `times` repeats of `work` make each."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(times):
        work()
    profile.disable()
    total: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return total / times


async def test_redis_is_asked_once_for_many_requests(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, REQUESTS)
    redis_client.config_resetstat()
    # Without side tasks: a slow machine has time for more sweeps.
    async with draining(redis_url, side_tasks=False, simulated_slots=64) as running:
        await soon(lambda: now(store).finished, 30)
        popped = running.drain.counts.popped
    calls = {name.decode() if isinstance(name, bytes) else name: figures["calls"]
             for name, figures in redis_client.info("commandstats").items()}  # fmt: skip
    polled = calls.get("cmdstat_hgetall", 0)  # by `soon` above
    assert popped == REQUESTS
    assert calls["cmdstat_evalsha"] / REQUESTS < 0.06
    assert (sum(calls.values()) - polled) / REQUESTS < 21


async def test_a_drained_request_leaves_nothing_behind_in_the_worker(
    redis_url: str, store: BatchStore
) -> None:
    blocks = []
    async with draining(redis_url, simulated_slots=64) as running:
        for batch_id in ("warm", "b1", "b2", "b3"):
            submit_batch(store, REQUESTS, batch_id=batch_id)
            await soon(lambda name=batch_id: now(store, name).finished, 30)
            await soon(lambda: not running.drain.in_flight)
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        assert running.drain.counts.popped == 4 * REQUESTS
    # One object kept for each request would be one; cancelled timers come and go.
    assert (blocks[-1] - blocks[0]) / (3 * REQUESTS) < 0.5


async def test_a_result_is_collected_with_few_calls_and_commands(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, REQUESTS)
    async with draining(redis_url, simulated_slots=64):
        await soon(lambda: now(store).finished, 30)
    for order, bound in (("input", 24), ("completion", 35)):
        redis_client.config_resetstat()
        collector = Collector(store, now(store), follow=False)
        lines: list[ResultLine] = []
        calls = calls_per(1, lambda c=collector, o=order, ls=lines: ls.extend(c.lines(o)))
        assert len(lines) == REQUESTS
        assert calls / REQUESTS < bound
        commands = sum(found["calls"] for found in redis_client.info("commandstats").values())
        assert commands / REQUESTS < 0.04


def test_a_queued_request_takes_little_more_than_its_message(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, bodies=[chat("x" * 500 + str(n)) for n in range(5_000)])
    # Of the keys: used_memory has the connection's buffer in it for some seconds.
    took = sum(redis_client.memory_usage(key, samples=0) for key in redis_client.scan_iter())
    messages = redis_client.lrange(submitted.list_key, 0, -1)
    assert len(messages) == 5_000
    assert took <= 1.3 * sum(map(len, messages))


def test_a_line_is_checked_and_written_with_few_calls() -> None:
    line = orjson.dumps({"custom_id": "c1", "method": "POST", "url": CHAT_URL,
                         "body": chat("How are you?", max_tokens=64)})  # fmt: skip
    request = parse_line(line, {})
    writer = MessageWriter("b1", 1, "life", "warmq", 6)
    message = writer.write("rid", "c1", 1, request.url, request.body)
    assert calls_per(100, lambda: parse_line(line, {})) < 29
    assert calls_per(100, lambda: writer.write("rid", "c1", 1, request.url, request.body)) < 10
    # Three calls look for what online requests have: a listener, and how long a result is kept
    assert calls_per(100, lambda: read_delivery("w/1", message)) < 50
