"""All of Redis at one moment, and how the protocol lays out its records.

The one place in the tests that knows these layouts, apart from the scripts themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson
import redis
from kit.protocol import script_keys

from contract import naming
from contract.index import IndexChunk
from contract.redis import keys

#: Every key with its type, its time to live in ms (-1: none) and what it holds, in one step, so
#: that no worker moves anything meanwhile. ARGV: where to cut texts off (-1: nowhere).
DUMP = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind, held = redis.call('TYPE', key).ok, {}
  if kind == 'hash' then held = redis.call('HGETALL', key)
  elseif kind == 'zset' then held = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'set' then held = redis.call('SMEMBERS', key)
  elseif kind == 'list' then held = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'string' then held = { redis.call('GETRANGE', key, 0, ARGV[1]) } end
  found[#found + 1] = { key, kind, redis.call('PTTL', key), held }
end
local time = redis.call('TIME')
return { time[1] * 1000 + math.floor(time[2] / 1000), found }
"""
_RESULT = naming.RESULT_PREFIX.encode()
_BATCH = keys.batch_key("").encode()
_WORKER = script_keys.worker_key("").encode()


@dataclass(frozen=True, slots=True)
class Message:
    """A queued message as far as the protocol reads it; `id` is empty if it is none."""

    id: str = ""
    batch: str = ""
    life: str = ""


@lru_cache(maxsize=4096)
def read_message(raw: bytes) -> Message:
    """Read a message, hostile ones too."""
    try:
        headers = orjson.loads(raw)["headers"]
        ours = headers.get("warmq")
        ours = ours if isinstance(ours, dict) else {}
        if not isinstance(headers["id"], str):
            return Message()
        return Message(
            headers["id"],
            str(ours.get("batch", "")),
            str(ours.get("life", "")),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return Message()


@lru_cache(maxsize=4096)
def _chunk_ids(batch_id: str, raw: bytes) -> list[str]:
    return IndexChunk.load(raw).request_ids(batch_id)


@dataclass(slots=True)
class Snapshot:
    """What Redis holds. Times are ms of Redis time, names and ids are text."""

    now: int
    ttl: dict[bytes, int] = field(default_factory=dict)
    held: dict[bytes, Any] = field(default_factory=dict)

    @classmethod
    def take(cls, client: redis.Redis, *, texts: bool = False) -> Snapshot:
        """Look at every key; without `texts`, results are not read."""
        now, found = client.eval(DUMP, 0, -1 if texts else 0)
        snap = cls(now)
        for key, kind, ttl, held in found:
            snap.ttl[key] = ttl
            if kind in (b"hash", b"zset"):
                snap.held[key] = dict(zip(held[::2], held[1::2], strict=True))
            elif kind == b"string":
                snap.held[key] = held[0]
            else:
                snap.held[key] = held
        return snap

    def hash(self, key: str) -> dict[str, bytes]:
        """Return a hash or sorted set by field, {} if there is none."""
        held = self.held.get(key.encode(), {})
        return {name.decode(errors="replace"): value for name, value in held.items()}

    def list(self, key: str) -> list[bytes]:
        """Return a list from its head, [] if there is none."""
        held: list[bytes] = self.held.get(key.encode(), [])
        return held

    def ends(self, key: str) -> bool:
        """Whether a key has a time to live."""
        return self.ttl.get(key.encode(), -1) >= 0

    # -- batches --------------------------------------------------------------------

    def batches(self) -> list[str]:
        """Return the batches that are registered."""
        return list(self.hash(keys.BATCHES))

    def batch(self, batch_id: str) -> dict[str, str]:
        """Return the hash of a batch, {} if there is none."""
        return {n: v.decode() for n, v in self.hash(keys.batch_key(batch_id)).items()}

    def life(self, batch_id: str) -> str:
        """Return what tells this life of a batch from others; "" if there is no batch, or it is
        being deleted."""
        batch = self.batch(batch_id)
        return "" if "deleting" in batch else batch.get("life", "")

    def is_of(self, batch_id: str, message: Message) -> bool:
        """Whether a message belongs to this life of a batch."""
        life = self.life(batch_id)
        return bool(life) and (message.batch, message.life) == (batch_id, life)

    def request_ids(self, batch_id: str) -> list[str]:
        """Return the request ids of a batch in line order."""
        chunks = self.list(keys.batch_key(batch_id, "index"))
        return [rid for raw in chunks for rid in _chunk_ids(batch_id, raw)]

    def batch_keys(self, batch_id: str) -> set[str]:
        """Return the keys that belong to a batch, results aside."""
        parts = {keys.batch_key(batch_id, part) for part in ("", "index", "finished", "failed")}
        kept = {script_keys.kept_key(batch_id, rid) for rid in self.kept(batch_id)}
        return parts | kept

    def retriable(self, batch_id: str) -> dict[str, str]:
        """Return how requests ended that `producer retry` may run again, by request id."""
        return {rid: note[1].decode() for rid, note in self._notes(batch_id)}

    def _notes(self, batch_id: str) -> Iterator[tuple[str, list[bytes]]]:
        """Yield how requests have ended that may run again, and where their messages go then."""
        for rid, note in self.hash(keys.batch_key(batch_id, "failed")).items():
            yield rid, note.split(b"\0", 3)

    def kept(self, batch_id: str) -> set[str]:
        """Return the requests whose message lies with the batch, as its notes have it."""
        return {rid for rid, note in self._notes(batch_id) if note[3]}

    def kept_message(self, batch_id: str, request_id: str) -> Message | None:
        """Return the message that a batch keeps for a request."""
        kept = self.list(script_keys.kept_key(batch_id, request_id))
        return read_message(kept[0]) if len(kept) == 1 else None

    # -- messages -------------------------------------------------------------------

    def queues(self) -> set[str]:
        """Return the queues that batches, workers or plain clients use."""
        told = (orjson.loads(raw.partition(b"\0")[2]) for raw in self.hash(keys.WORKERS).values())
        of_batches = {self.batch(batch_id).get("queue") for batch_id in self.batches()}
        found = {naming.DEFAULT_QUEUE} | of_batches | {worker.get("queue") for worker in told}
        return {queue for queue in found if queue}

    def queued(self) -> Iterator[Message]:
        """Yield the messages that wait in any list, suspects' too."""
        for queue in self.queues():
            for key in (*naming.priority_lists(queue), keys.suspects_list(queue)):
                yield from map(read_message, self.list(key))
            for key in self.turn_lists(queue):
                yield from map(read_message, self.list(key))

    def turn_lists(self, queue: str) -> list[str]:
        """Return the lists of batches that wait in a queue."""
        begin = f"{queue}{naming.PRIORITY_SEPARATOR}"
        names = (key.decode(errors="replace") for key in self.held)
        return [name for name in names if name.startswith(begin) and name.count("\x06") == 3]

    def turns(self, queue: str) -> list[str]:
        """Return the keys that say whose turn it is."""
        begin = naming.turns_key(queue)
        names = (key.decode(errors="replace") for key in self.held)
        return [name for name in names if name.startswith((f"{begin}\x06", f"{begin}:"))]

    def workers(self) -> list[str]:
        """Return the workers that hold leases."""
        return [key[len(_WORKER) :].decode() for key in self.held if key.startswith(_WORKER)]

    def leases(self, worker: str) -> dict[str, Message]:
        """Return what a worker's records say that it holds, by lease."""
        records = self.hash(script_keys.worker_key(worker))
        return {lease: Message(*map(bytes.decode, raw.split(b"\0", 7)[5:]))
                for lease, raw in records.items()}  # fmt: skip

    def leased(self, worker: str) -> dict[str, Message]:
        """Return the messages that a worker holds, by lease; none where there is not just one."""
        held = {lease: self.list(script_keys.leased_key(lease)) for lease in self.leases(worker)}
        return {lease: read_message(messages[0]) if len(messages) == 1 else Message()
                for lease, messages in held.items()}  # fmt: skip

    def lease_keys(self, worker: str) -> set[str]:
        """Return the keys that hold a worker's leases and their messages."""
        return {script_keys.worker_key(worker)} | {
            script_keys.leased_key(lease) for lease in self.leases(worker)
        }

    def dead(self) -> dict[str, Message]:
        """Return the dead letters by number, as their records have it."""
        letters = self.hash(keys.DEAD)
        return {number: Message(*(part.decode(errors="replace") for part in raw.split(b"\0")[3:6]))
                for number, raw in letters.items()}  # fmt: skip

    def results(self) -> dict[str, bytes]:
        """Return the stored results by request id."""
        return {key[len(_RESULT) :].decode(): text for key, text in self.held.items()
                if key.startswith(_RESULT) and isinstance(text, bytes)}  # fmt: skip


def suspects_leased(client: redis.Redis, worker: str) -> list[str]:
    """Return the request ids that a worker holds from a list of suspects."""
    records = [raw.split(b"\0") for raw in client.hvals(script_keys.worker_key(worker))]
    return [record[4].decode() for record in records if record[2].endswith(b":suspects")]


def request_of(record: bytes) -> str:
    """Return the request id in a lease's record, also in one of the release before this one."""
    parts = record.split(b"\0")
    return parts[5].decode() if len(parts) == 8 else read_message(parts[2]).id


def lease_record(request_id: str, batch: str = "", life: str = "") -> bytes:
    """Return a lease's record as POP writes it."""
    return "\0".join(("64", "100", "warmq", "warmq", request_id, batch, life)).encode()


def letter_record(request_id: str, batch: str = "", life: str = "") -> bytes:
    """Return a dead letter's record."""
    return "\0".join(("1", "100", "warmq", request_id, batch, life, "null", "poison")).encode()
