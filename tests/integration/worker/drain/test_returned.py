"""The drain hands back the requests that its engine returns."""

from __future__ import annotations

import redis
from kit.drain.draining import draining, leased, soon
from kit.protocol.lessee import now, stored, submit_batch

from contract.redis import keys
from contract.redis.batches import BatchStore
from worker.engine import Completion, EngineRequest, RequestReturned
from worker.engine.simulated.engine import SimulatedEngine


class Returning(SimulatedEngine):
    """Returns each request once, then answers it."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if request_id not in self.returned:
            self.returned.add(request_id)
            raise RequestReturned("others need the server")
        return await super().generate(request, request_id)

    def build(self) -> None:
        super().build()
        self.returned = set[str]()


async def test_what_the_engine_returns_goes_back_to_the_queue_and_counts_no_death(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submitted = submit_batch(store, 30)
    async with draining(redis_url, engine=Returning) as running:
        await soon(lambda: now(store).finished)
        await soon(lambda: not running.drain.in_flight)
        assert len(running.engines) == 1
        assert running.drain.counts.handed_back == 30
    metas = [stored(redis_client, rid) for rid in submitted.ids]
    assert [meta["warmq"]["timing"]["attempts"] for meta in metas if meta] == [2] * 30
    assert now(store).number("completed") == 30
    assert redis_client.hlen(keys.DEATHS) == 0
    assert leased(redis_client) == 0
