"""Suspects are handed back as the group they ran in, or a halving blames an innocent."""

from __future__ import annotations

import redis
from lessee import QUEUE, Lessee, submit_batch

from contract import keys
from contract.store import BatchStore

SUSPECTS = keys.suspects_list(QUEUE)


def test_a_group_larger_than_one_sweep_takes_is_swept_as_one(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 5)
    lessee = Lessee(redis_client)
    # Given five suspects, in the engine of a worker that dies
    for _ in range(2):
        leases = lessee.pop()
        lessee.release(*leases, died=leases)
    assert redis_client.llen(SUSPECTS) == 5
    group = Lessee(redis_client, "w2").pop(lists=[SUSPECTS])
    assert len(group) == 5
    # When sweeps have room for four of them
    lessee.expire_leases(*group)
    lessee.sweep(limit=4)
    lessee.sweep(limit=4)
    # Then none of them was alone: the group is halved and nobody is the culprit
    assert redis_client.hlen(keys.DEAD) == 0
    assert redis_client.llen(SUSPECTS) == 5
    assert redis_client.get(f"{SUSPECTS}:group") == b"3"
    assert store.returns(submitted.ids[0]) == 3
