"""Real workers, started and stopped as KEDA's rule over the real queue says: nothing is lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import redis
from kit.chart.keda_rule import EVERY_S, Scaler
from kit.drain.draining import Draining, draining, soon
from kit.protocol.lessee import QUEUE, counts, now, stored, submit_batch

from contract.redis import keys
from contract.redis.batches import BatchStore
from gateway.redis.fleet import Loads

REQUESTS, TARGET = 600, "100"
SPEC = {
    "minReplicaCount": 0, "maxReplicaCount": 4, "cooldownPeriod": 60,
    "triggers": [{"metadata": {"targetValue": TARGET, "activationTargetValue": "0"}}],
    "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {
        "stabilizationWindowSeconds": 30,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 30}],
    }}}},
}  # fmt: skip


def completed(store: BatchStore) -> int:
    return now(store).number("completed")


async def test_workers_that_go_while_requests_run_lose_none_and_count_no_death(
    redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    """Half of those that are told to go get no time to drain, so they hand back what runs."""
    submitted = submit_batch(store, REQUESTS)
    loads, rule, chance = Loads.using(store), Scaler(SPEC), random.Random(7)
    workers: list[Draining] = []
    seen, gone_while_running, clock = [0], 0, 0.0
    async with AsyncExitStack() as stack:

        async def scale(to: int) -> int:
            running = 0
            while len(workers) < to:
                worker = draining(redis_url, simulated_latency_s=0.03, drain_timeout_s=30)
                workers.append(await stack.enter_async_context(worker))
            while len(workers) > to:
                victim = workers.pop(chance.randrange(len(workers)))  # nobody looks at its work
                running += bool(victim.drain.in_flight)
                victim.drain.stop()
                if chance.random() < 0.5:
                    victim.drain.hurry()
                await victim.ended()
            return running

        def look() -> bool:
            return bool(seen[-1] == 0 and now(store).finished)

        while not look():
            load = await asyncio.to_thread(loads.load, QUEUE)
            replicas = rule.decide(clock, load.waiting + load.in_flight)  # each is a token
            gone_while_running += await scale(replicas)
            if replicas != seen[-1]:
                seen.append(replicas)
            # The rule's clock turns with the queue: a decision for every dozen of answers.
            if replicas:
                goal = min(REQUESTS, completed(store) + 12)
                await soon(lambda goal=goal: completed(store) >= goal)
            clock += EVERY_S

    assert counts(now(store)) == {"completed": REQUESTS}
    assert max(seen) == 4
    assert seen[-1] == 0
    assert gone_while_running > 0
    assert all(stored(redis_client, request_id) for request_id in submitted.ids)
    assert redis_client.hlen(keys.DEATHS) == 0
    assert redis_client.zcard(keys.LEASES) == 0
    assert loads.load(QUEUE).tokens == 0
