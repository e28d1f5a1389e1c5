"""What a worker of 0.1.0 leaves in Redis of itself."""

import orjson
import redis

from contract.redis import keys


def announce(client: redis.Redis, worker: str, **told: object) -> None:
    """Leave what a living worker says of itself, by default one of 0.1.0."""
    record = {"state": "ready", "queue": "warmq", "version": "0.1.0", "in_flight": 0} | told
    client.hset(keys.WORKERS, worker, b"%d\0" % (client.time()[0] * 1000) + orjson.dumps(record))
