"""What only producers do in Redis.

They read results ahead: Redis looks the next ones up while the caller uses the last ones. They find
out by trying what a user may do; docs/how-to/security.md lists what each side needs. And an
operator sees and removes what tenants of gateways keep in Redis.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import orjson
from redis.exceptions import RedisError

from contract.errors import BatchConflict, StoreForbidden
from contract.naming import RESULT_PREFIX
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.due import Due
from contract.redis.objects import Kind, Objects
from contract.redis.reads import Reads
from contract.redis.records import Record, Records


class ResultPrefetch:
    """Asks for one set of results at a time, on a connection of its own.

    If that connection fails, the same results are read through the store, which waits a few
    seconds for a Redis that is away and raises its errors.
    """

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._pool = store._client.connection_pool
        self._asked: Sequence[str] = ()
        self._connection: Any = None

    def ask(self, request_ids: Sequence[str]) -> None:
        """Ask for the results of these requests; the `answer` before must have been taken."""
        self._asked = request_ids
        try:
            if self._connection is None:
                self._connection = self._pool.get_connection()
            self._connection.send_command("MGET", *map(keys.result_key, request_ids))
        except RedisError:
            self.close()

    def answer(self) -> list[bytes | None]:
        """Return the stored results, None where there is none (yet).

        Raises:
            StoreUnavailable: Redis cannot be used.
        """
        asked = self._asked
        if self._connection is not None:
            try:
                found: list[bytes | None] = self._connection.read_response()
                self._asked = ()
                return found
            except RedisError:
                self.close()
        return self._store.results(asked)

    def close(self) -> None:
        """Give the connection back to the pool; one with an unread reply is closed first."""
        if self._connection is not None:
            if self._asked:
                self._connection.disconnect()
            self._pool.release(self._connection)
            self._connection = None


_KEY = keys.SCRATCH
_RESULT = f"{RESULT_PREFIX}warmq-scratch"
#: What a producer runs, in forms that change nothing: see permissions.lua.
PRODUCER_COMMANDS = tuple(
    line.format(key=_KEY).split()
    for line in """
    set {key} 1
    get {key}
    getrange {key} 0 0
    mget {key}
    incr {key}
    exists {key}
    pexpire {key} 60000
    pttl {key}
    persist {key}
    hget {key} f
    hset {key} f v
    hdel {key} f
    hexists {key} f
    hgetall {key}
    hmget {key} f
    hscan {key} 0
    hincrby {key} f 1
    lindex {key} 0
    llen {key}
    lrange {key} 0 0
    lpop {key}
    lpush {key} v
    rpush {key} v
    lmove {key} {key} LEFT LEFT
    lset {key} 0 v
    sadd {key} m
    smembers {key}
    zadd {key} 1 m
    zrange {key} 0 0
    zrem {key} m
    zrevrange {key} 0 0
    zscore {key} m
    publish {key} v
    del {key}
    unlink {key}
    """.strip().splitlines()
)
#: What only a worker runs, as far as a script may run it.
WORKER_SETTINGS = tuple(
    line.format(key=_KEY).split()
    for line in """
    set {key} 1
    incrby {key} 1
    rename {key} {key}
    hkeys {key}
    hrandfield {key} 1
    ltrim {key} 0 0
    sismember {key} m
    srandmember {key} 1
    srem {key} m
    zcard {key}
    zincrby {key} 1 m
    zmscore {key} m
    zrandmember {key} 1
    zrangebyscore {key} 0 0
    zremrangebyscore {key} 0 0
    """.strip().splitlines()
)
#: How long to wait for what Redis says to SUBSCRIBE, in seconds.
ANSWER_S = 5.0
_KEYS_OF_CELERY = ("_kombu.binding.scratch", "scratch.celery.pidbox")
#: How Redis 6.2 and later, and Valkey, refuse a command, key or channel within a script.
_REFUSED = re.compile(r"NOPERM|user executing the script|ACL failure|no permissions", re.IGNORECASE)


def missing_permissions(store: Reads, queue: str, *, worker: bool) -> list[str]:
    """Return what a producer with this queue needs and is not allowed; with `worker` also for one.

    Commands are told by their names, keys as `~key`, channels as `&channel`. Redis notes each
    refusal in its ACL LOG.

    Raises:
        StoreUnavailable: Redis cannot be used.
    """
    tried = [*PRODUCER_COMMANDS, ["exists", queue], ["exists", _RESULT], ["publish", _RESULT, ""]]
    if worker:
        tried += [*WORKER_SETTINGS, *(["exists", name] for name in _KEYS_OF_CELERY)]
    try:
        said = store._client.run_script("permissions", orjson.dumps(tried))
    except StoreForbidden:
        return ["evalsha", "script|load"]
    found = [] if _may_subscribe(store) else ["subscribe"]
    for words, text in zip(tried, map(bytes.decode, said), strict=True):
        command, name = words[:2]
        if _REFUSED.search(text) and command not in found:
            sign = "&" if command == "publish" else "~"
            # One for a key or channel only if the command may be used on others.
            found.append(command if name == _KEY else sign + name)
    return found


def _may_subscribe(store: Reads) -> bool:
    """Whether this user may run SUBSCRIBE, which no script can."""
    with closing(store._client.pubsub()) as pubsub:
        try:
            pubsub.subscribe(_KEY)
            pubsub.get_message(timeout=ANSWER_S)
        except StoreForbidden:
            return False
    return True


#: Records looked at to say which kinds a tenant has: a bound on what the doctor asks of Redis.
SAMPLED = 1000
#: A file's content goes so long after its record: a batch may still read it.
CONTENT_MS = 600_000
_ENDED = frozenset(("completed", "failed", "expired", "cancelled"))


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant has: bytes in all, and how many of each kind, the most frequent first.

    With `sampled` the kinds are those of SAMPLED records only.
    """

    tenant: str
    bytes: int
    kinds: dict[str, int]
    sampled: bool


def tenant_usage(redis: Reads) -> Iterator[TenantUsage]:
    """Yield what each tenant has, the largest first."""
    records = Records.using(redis)
    for tenant, held in sorted(records.owners().items(), key=lambda pair: -pair[1]):
        kinds = records.kinds_of(tenant, SAMPLED)
        yield TenantUsage(tenant, held, dict(kinds.most_common()), kinds.total() >= SAMPLED)


def tenant_records(redis: Reads, tenant: str) -> Iterator[Record]:
    """Yield a tenant's records in no order."""
    return Records.using(redis).of(tenant)


def delete_record(redis: BatchStore, object_id: str) -> Kind | None:
    """Remove a tenant's batch that has ended, with its results, or a file, whose content a gateway
    then removes.

    Returns:
        What it was; None if there is no such object.

    Raises:
        BatchConflict: it is a batch that has not ended.
    """
    objects, kind = Objects.using(redis), _kind_of(object_id)
    owner = objects.owner_of(kind, object_id) if kind is not None else None
    if kind is None or owner is None:
        return None
    parts: list[str] = []
    if kind == "file":
        Due.using(redis).add("file", object_id, CONTENT_MS)  # first: else its content would stay
    else:
        stored = objects.get(kind, owner, object_id)
        record = orjson.loads(stored.document) if stored else {}
        status, parts = record.get("status", "validating"), _parts(record)
        if stored is not None and status not in _ENDED:
            raise BatchConflict(
                f"batch {object_id} of tenant {owner} is {status}; its tenant must cancel it first"
            )
    for batch_id in parts:  # first: killed in between, the same call ends it
        redis.delete(batch_id, force=True)
    objects.delete(kind, owner, object_id)
    return kind


def _parts(record: dict[str, Any]) -> list[str]:
    """Return the queues' batches of a gateway's batch."""
    return [part["batch_id"] for part in record.get("parts", ())]


def _kind_of(object_id: str) -> Kind | None:
    if object_id.startswith("file-"):
        return "file"
    return "batch" if object_id.startswith(("batch_", "msgbatch_")) else None
