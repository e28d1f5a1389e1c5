"""Makes calls to Redis that only producers need: for results, rights and tenants' records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson
from redis.exceptions import RedisError

from contract.batch import Batch
from contract.errors import BatchConflict, StoreForbidden
from contract.naming import RESULT_PREFIX
from contract.redis import keys
from contract.redis.batches import BatchStore, read_note
from contract.redis.due import Due
from contract.redis.objects import Kind, Objects
from contract.redis.reads import PAGE, Reads
from contract.redis.records import Record, Records
from contract.webhooks import new_secret


class ResultPrefetch:
    """Reads the next results on a connection of its own, while the caller uses earlier ones.

    If that connection fails, the results are read through the store. The store waits a few seconds
    for an unreachable Redis, and raises its errors.
    """

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._pool = store._client.connection_pool
        self._asked: Sequence[str] = ()
        self._connection: Any = None

    def ask(self, request_ids: Sequence[str]) -> None:
        """Send the command that reads results; call `answer` before the next `ask`."""
        self._asked = request_ids
        try:
            if self._connection is None:
                self._connection = self._pool.get_connection()
            self._connection.send_command("MGET", *map(keys.result_key, request_ids))
        except RedisError:
            self.close()

    def answer(self) -> list[bytes | None]:
        """Return the requested results; None for each that does not exist (yet)."""
        asked = self._asked
        if self._connection is not None:
            try:
                results: list[bytes | None] = self._connection.read_response()
                self._asked = ()
                return results
            except RedisError:
                self.close()
        return self._store.results(asked)

    def close(self) -> None:
        """Return the connection to the pool; disconnect it first if a reply is unread."""
        if self._connection is not None:
            if self._asked:
                self._connection.disconnect()
            self._pool.release(self._connection)
            self._connection = None


class NotifySecret(Reads):
    """Reads the secret that signs the webhooks of `submit --notify`."""

    def get(self) -> str:
        """Return the secret; make it if there is none. Raises StoreUnavailable."""
        self._client.set(keys.NOTIFY_SIGNING, new_secret(), nx=True)
        return (self._client.get(keys.NOTIFY_SIGNING) or b"").decode()


class EndedRequests(Reads):
    """Counts the ended requests of a batch that a retry can queue again."""

    def counts(self, batch: Batch, outcomes: Collection[str]) -> tuple[Counter[str], Counter[str]]:
        """Return by outcome how many lines can run again, and of how many the message is gone."""
        found = self._client.hscan_iter(keys.batch_key(batch.id, "failed"), count=PAGE)
        can_run, gone = Counter[str](), Counter[str]()
        while page := list(islice(found, PAGE)):
            noted = [(name.decode(), note, read_note(note)[0]) for name, note in page]
            ended = [one for one in noted if one[2] in outcomes]
            # A note that ends with a NUL names no list: the message still waits in the queue.
            kept = [name for name, note, _ in ended if not note.endswith(b"\0")]
            exist = self._each("exists", [keys.batch_key(batch.id, f"kept:{n}") for n in kept])
            missing = {name for name, found in zip(kept, exist, strict=True) if not found}
            lines = self._lines(batch, [name for name, _, _ in ended])
            for (name, _, outcome), count in zip(ended, lines, strict=True):
                (gone if name in missing else can_run)[outcome] += count
        return can_run, gone

    def _lines(self, batch: Batch, ids: Sequence[str]) -> list[int]:
        """Return the number of lines of each request: 1, and its followers."""
        if not (batch.dedupe and ids):
            return [1] * len(ids)
        followers: Any = self._client.hmget(keys.batch_key(batch.id, "identical"), ids)
        return [1 + int(count or 0) for count in followers]


_KEY = keys.SCRATCH
_RESULT = f"{RESULT_PREFIX}warmq-scratch"


def _commands(table: str) -> tuple[list[str], ...]:
    return tuple(command.format(key=_KEY).split() for command in table.split(";"))


#: Commands that a producer runs, with arguments that change only a scratch key (permissions.lua).
PRODUCER_COMMANDS = _commands("""
    set {key} 1; get {key}; getrange {key} 0 0; mget {key}; incr {key}; exists {key};
    pexpire {key} 60000; pttl {key}; persist {key};
    hget {key} f; hset {key} f v; hdel {key} f; hexists {key} f; hgetall {key}; hmget {key} f;
    hscan {key} 0; hincrby {key} f 1;
    lindex {key} 0; llen {key}; lrange {key} 0 0; lpop {key}; lpush {key} v; rpush {key} v;
    lmove {key} {key} LEFT LEFT; lset {key} 0 v;
    hlen {key}; rename {key} {key}; bitfield {key} set u1 0 0; strlen {key};
    sadd {key} m; smembers {key};
    zadd {key} 1 m; zrange {key} 0 0; zrem {key} m; zrangebyscore {key} 0 0;
    zrevrange {key} 0 0; zscore {key} m; publish {key} v; del {key}; unlink {key}
""")
#: Commands that a worker runs in addition, except those that a script cannot run.
WORKER_COMMANDS = _commands("""
    set {key} 1; incrby {key} 1;
    hkeys {key}; hrandfield {key} 1; ltrim {key} 0 0;
    sismember {key} m; srandmember {key} 1; srem {key} m;
    zcard {key}; zincrby {key} 1 m; zmscore {key} m; zrandmember {key} 1;
    zremrangebyscore {key} 0 0
""")
#: Seconds to wait for Redis's reply to SUBSCRIBE.
ANSWER_S = 5.0
#: Key names that match the patterns of the keys that Celery writes.
_KEYS_OF_CELERY = ("_kombu.binding.scratch", "scratch.celery.pidbox")
#: Pattern of the errors for a command, key or channel that the user of a script may not use, in
#: Redis 6.2 and later and in Valkey.
_REFUSED = re.compile(r"NOPERM|user executing the script|ACL failure|no permissions", re.IGNORECASE)


def missing_permissions(store: Reads, queue: str, *, worker: bool) -> list[str]:
    """Return the rights that Redis's user lacks to submit to a queue.

    With `worker`, the rights of a worker are checked too. A right is the name of a command,
    `~key` or `&channel`. Redis logs each refusal in ACL LOG.
    """
    tried = [*PRODUCER_COMMANDS, ["exists", queue], ["exists", _RESULT], ["publish", _RESULT, ""]]
    if worker:
        tried += [*WORKER_COMMANDS, *(["exists", name] for name in _KEYS_OF_CELERY)]
    try:
        errors = store._client.run_script("permissions", orjson.dumps(tried))
    except StoreForbidden:
        return ["evalsha", "script|load"]
    missing = [] if _may_subscribe(store) else ["subscribe"]
    for words, text in zip(tried, map(bytes.decode, errors), strict=True):
        command, name = words[:2]
        if _REFUSED.search(text) and command not in missing:
            sign = "&" if command == "publish" else "~"
            # The command may use the scratch key, so the right to this key or channel is missing.
            missing.append(command if name == _KEY else sign + name)
    return missing


def _may_subscribe(store: Reads) -> bool:
    """Whether Redis's user may run SUBSCRIBE, which a script cannot run."""
    with closing(store._client.pubsub()) as pubsub:
        try:
            pubsub.subscribe(_KEY)
            pubsub.get_message(timeout=ANSWER_S)
        except StoreForbidden:
            return False
    return True


#: Most records of one tenant that are counted by kind.
SAMPLED = 1000
#: Milliseconds from the deletion of a file's record to the deletion of its content, which a batch
#: may still read.
CONTENT_MS = 600_000
#: Statuses of a gateway's batch that has ended.
_ENDED = frozenset(("completed", "failed", "expired", "cancelled"))


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The bytes in Redis of a tenant's records, and their number by kind.

    `kinds` has the most frequent kind first. With `sampled`, `kinds` counts only SAMPLED records.
    """

    tenant: str
    bytes: int
    kinds: dict[str, int]
    sampled: bool


def tenant_usage(redis: Reads) -> Iterator[TenantUsage]:
    """Yield each tenant's usage, the largest first."""
    records = Records.using(redis)
    for tenant, size in sorted(records.owners().items(), key=lambda pair: -pair[1]):
        kinds = records.kinds_of(tenant, SAMPLED)
        yield TenantUsage(tenant, size, dict(kinds.most_common()), kinds.total() >= SAMPLED)


def tenant_records(redis: Reads, tenant: str) -> Iterator[Record]:
    """Yield a tenant's records, unordered."""
    return Records.using(redis).of(tenant)


def delete_record(redis: BatchStore, object_id: str, *, force: bool = False) -> Kind | None:
    """Delete a gateway's file, or its ended batch or background response with the results.

    Returns the object's kind; None for an unknown id. A gateway later deletes a file's content.
    Raises BatchConflict for a batch or response that has not ended, and for a batch whose requests
    run again, which `force` cancels.
    """
    objects, kind = Objects.using(redis), _kind_of(object_id)
    owner = objects.owner_of(kind, object_id) if kind is not None else None
    if kind is None or owner is None:
        return None
    batch_ids: list[str] = []
    if kind == "file":
        # The content becomes due first, so that it does not stay if the next call fails.
        Due.using(redis).add("file", object_id, CONTENT_MS)
    elif kind == "response":
        _delete_result(redis, owner, object_id)
    else:
        stored = objects.get(kind, owner, object_id)
        record = orjson.loads(stored.document) if stored else {}
        status = record.get("status", "validating")
        batch_ids = [part["batch_id"] for part in record.get("parts", ())]
        if stored is not None and status not in _ENDED:
            raise BatchConflict(
                f"batch {object_id} of tenant {owner} is {status}; its tenant must cancel it first"
            )
        _end_requests(redis, object_id, batch_ids, force=force)
    # The record is deleted last, so that the same call completes an interrupted deletion.
    for batch_id in batch_ids:
        redis.delete(batch_id, force=True)
    objects.delete(kind, owner, object_id)
    return kind


def _delete_result(redis: BatchStore, owner: str, response_id: str) -> None:
    """Delete the result of a background response; raise BatchConflict if it has not ended."""
    key = keys.result_key(response_id.removeprefix("resp_"))
    ended = redis._client.hexists(f"warmq:gateway:response:{response_id}", "ended")
    if not (ended or redis._client.exists(key)):
        raise BatchConflict(
            f"response {response_id} of tenant {owner} has not ended; its tenant must cancel it "
            "first"
        )
    redis._client.unlink(key)


def _end_requests(
    redis: BatchStore, object_id: str, batch_ids: Sequence[str], *, force: bool
) -> None:
    """Cancel requests that a producer of 0.2.0 has queued again; without `force` refuse that."""
    for batch in redis.states(batch_ids):
        if batch is None or batch.finished or batch.status == "deleting":
            continue
        if not force:
            raise BatchConflict(
                f"requests of batch {object_id} run again ({batch.status}); --force cancels them "
                "first"
            )
        redis.cancel(batch)


def _kind_of(object_id: str) -> Kind | None:
    if object_id.startswith("file-"):
        return "file"
    if object_id.startswith("resp_"):
        return "response"
    return "batch" if object_id.startswith(("batch_", "msgbatch_")) else None
