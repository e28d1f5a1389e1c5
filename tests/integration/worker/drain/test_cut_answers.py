"""A worker counts the answers of a batch that ended at their limit of tokens."""

from __future__ import annotations

import orjson
import redis
from kit.drain.draining import draining, soon
from kit.protocol.lessee import chat, now, submit_batch

from contract.redis.batches import BatchStore
from worker.engine import Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine


class Limited(SimulatedEngine):
    """Ends an answer at its limit where the request has one; of two choices only the first."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        count = request.body.get("n") or 1
        ends = ["length" if "max_tokens" in request.body else "stop"] + ["stop"] * (count - 1)
        choices = [{"index": n, "finish_reason": end} for n, end in enumerate(ends)]
        return Completion(orjson.dumps({"choices": choices}), 1, 1)


async def test_cut_answers_are_counted_also_where_another_choice_is_whole(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    bodies = [chat("a"), chat("b", max_tokens=1), chat("c", max_tokens=1, n=2), chat("d", n=2)]
    submit_batch(store, bodies=bodies)
    async with draining(redis_url, Limited):
        await soon(lambda: now(store).finished)
    assert now(store).number("completed") == 4
    assert now(store).number("cut") == 2
