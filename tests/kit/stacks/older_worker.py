"""What a worker of 0.1.0 leaves in Redis of itself."""

import orjson
import redis

from contract.redis import keys


def announce(client: redis.Redis, worker: str, *, ahead_s: int = 0, **told: object) -> None:
    """Leave what a living worker says of itself, by default one of 0.1.0.

    In `ahead_s` seconds by Redis' clock: it still lives for a command that starts slowly.
    """
    record = {"state": "ready", "queue": "warmq", "version": "0.1.0", "in_flight": 0} | told
    at_ms = (client.time()[0] + ahead_s) * 1000
    client.hset(keys.WORKERS, worker, b"%d\0" % at_ms + orjson.dumps(record))
