"""What must be true of Redis after every step of the protocol, whatever was lost on the way.

A request of a live batch is in exactly one of these states:

    queued    no result; one message of this batch life waits in a list
    leased    no result; one such message is leased, or on its way back from a lease
    kept      a failure or a revocation is stored, and the message lies with the batch, for
              `retry`; or the message is a dead letter, for `dead retry`; or it was cancelled
              where it was queued or leased: there its message still is, until POP or DONE meet it
    ended     a result is stored and no message is kept. A message may still wait or be leased
              after a success: a worker that had lost its lease was faster than the next one. If
    that answer was cut and runs again, there is one message more

The result of a plain Celery request that uses the same id is none of the batch: it has an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson
from kit.protocol.model_world import Sent, World
from kit.protocol.snapshot import Message, Snapshot
from kit.verdicts.owners import outlived_in, ownerless_in

from contract.batch import Batch
from contract.failures import failures_of
from contract.redis import keys
from contract.results import OUTCOMES, is_cut, outcome_of

#: What a reply may have besides POP's messages: ids of a handful of leases.
REPLY_BYTES = 4096
#: Scripts that take results back.
UNDOING = {"retry", "dead_retry", "delete_chunk", "retry_cut"}
#: So many dead letters one sweep looks at, at random.
SWEPT_LETTERS = 20


class Judge:
    """Looks after each step, and remembers what it saw the step before."""

    def __init__(self) -> None:
        self.before = Snapshot(0)

    def objections(self, world: World) -> list[str]:
        """Return what is wrong now, or was in the step just done."""
        snap, sent = world.snapshot(), world.wire.sent
        undone = not UNDOING.isdisjoint(call[0] for call in sent)
        found = [*wrong(snap, world), *_changed(self.before, snap, undone=undone)]
        for call in sent:
            found += _over_bounds(self.before, *call)
        if sent and sent[-1][0] == "sweep" and len(snap.dead()) <= SWEPT_LETTERS:
            found += [f"{entry}: {why}" for entry, why in outlived_in(snap).items()]
        sent.clear()
        self.before = snap
        return found


def _changed(before: Snapshot, snap: Snapshot, *, undone: bool) -> Iterator[str]:
    """A result never changes; it goes when it is undone, at the end of its time, or its batch's."""
    results = snap.results()
    for request_id, raw in before.results().items():
        if results.get(request_id) == raw or undone or before.ends(keys.result_key(request_id)):
            continue
        if request_id in results:
            yield f"the result of {request_id} was {raw!r}, is {results[request_id]!r}"
            continue
        batch = read(raw)["warmq"]["batch"]
        if not batch or snap.life(batch):
            yield f"the result of {request_id} has gone"


def _over_bounds(before: Snapshot, name: str, args: Sequence[Any], reply: Any) -> Iterator[str]:
    """What one script may reply, and how many leases it may touch."""
    size = _size(reply)
    if name == "pop":
        k, max_bytes = max(0, int(args[2])), int(args[3])
        messages = [len(message) for message in reply[10::6]]
        size -= sum(messages)
        if len(messages) > k or sum(messages) > max([max_bytes, *messages]):
            yield f"pop gave {len(messages)} of {k} messages, {sum(messages)} of {max_bytes} bytes"
    # The leases of one worker are swept together: a part of them would be mistaken for all.
    largest = max((len(before.leases(worker)) for worker in before.workers()), default=0)
    if name == "sweep" and reply >= int(args[4]) + max(1, largest):
        yield f"sweep put {reply} leases back, allowed were {args[4]}"
    if size > REPLY_BYTES:
        yield f"{name} replied {size} bytes"


def _size(reply: Any) -> int:
    if isinstance(reply, list):
        return sum(map(_size, reply))
    return len(reply) if isinstance(reply, bytes) else 8


@lru_cache(maxsize=4096)
def read(raw: bytes) -> dict[str, Any]:
    """Read a stored result."""
    meta: dict[str, Any] = orjson.loads(raw)
    return meta


class Messages:
    """Where the messages are, by (request id, batch, life)."""

    def __init__(self, snap: Snapshot) -> None:
        self.queued = Counter(snap.queued())
        self.leases: dict[str, Message] = {}
        self.misplaced: list[str] = []
        self.leased: Counter[Message] = Counter()
        for worker in snap.workers():
            said, held = snap.leases(worker), snap.leased(worker)
            self.leases |= said
            self.leased.update(held.values())
            self.misplaced += [lease for lease, message in said.items() if held[lease] != message]
        self.dead = Counter(snap.dead().values())
        self.live = self.queued + self.leased


def wrong(snap: Snapshot, world: World) -> Iterator[str]:
    """Yield what is wrong in Redis."""
    where, results = Messages(snap), snap.results()
    for key, why in ownerless_in(snap).items():
        yield f"{key}: {why}"
    for lease in where.leases.keys() ^ snap.hash(keys.LEASES).keys():
        yield f"lease {lease} has no record, or no end"
    for lease in where.misplaced:
        yield f"lease {lease} has no message, or another one"
    for batch_id in snap.batches():
        if snap.life(batch_id):
            yield from (
                f"{batch_id}: {what}" for what in _batch(snap, batch_id, where, world.added)
            )
    for request_id, sent in world.plain.items():
        yield from _plain(request_id, sent, where, results)


def _batch(
    snap: Snapshot, batch_id: str, where: Messages, added: Counter[tuple[str, str]]
) -> Iterator[str]:
    batch, life, results = snap.batch(batch_id), snap.life(batch_id), snap.results()
    ids, kept, notes = snap.request_ids(batch_id), snap.kept(batch_id), snap.retriable(batch_id)
    of_life = {
        name: Counter({m.id: n for m, n in found.items() if (m.batch, m.life) == (batch_id, life)})
        for name, found in (("live", where.live), ("dead", where.dead))
    }
    metas: dict[str, Mapping[str, Any]] = {}
    for rid in ids:
        foreign = (
            "finished_at" not in batch and snap.ttl.get(keys.result_key(rid).encode(), -1) >= 0
        )
        meta = read(results[rid]) if rid in results and not foreign else None
        outcome = outcome_of(meta) if meta else ""
        if meta is not None:
            metas[rid] = meta
            yield from _answer(rid, meta, batch_id, life)
        if rid in kept and snap.kept_message(batch_id, rid) != Message(rid, batch_id, life):
            yield f"{rid} has not the message that is said to be kept"
        messages = of_life["live"][rid], int(rid in kept), of_life["dead"][rid]
        live, *others = messages
        if not any(_one_state(meta, live - n, *others) for n in range(added[rid, life] + 1)):
            yield f"{rid} has {outcome or 'no result'}, and messages (live, kept, dead) {messages}"
        if notes.get(rid, outcome) != outcome:
            yield f"{rid} has {outcome or 'no result'}, and is noted as {notes[rid]}"
    if strangers := notes.keys() - set(ids):
        yield f"keeps messages that are not its own: {strangers}"
    if foreigners := {rid for name in of_life for rid in of_life[name]} - set(ids):
        yield f"messages claim to be of it: {foreigners}"
    outcomes = Counter(outcome_of(dict(meta)) for meta in metas.values())
    yield from _counters(snap, batch_id, batch, len(ids), outcomes)
    yield from _failures(batch_id, batch, metas)
    yield from _cut(batch, (results[rid] for rid in metas))
    if "finished_at" not in batch:
        for key in sorted(key for key in snap.batch_keys(batch_id) if snap.ends(key)):
            yield f"{key} will expire, although the batch is not finished"


def _one_state(meta: Mapping[str, Any] | None, live: int, kept: int, dead: int) -> bool:
    if meta is None:
        return (live, kept, dead) == (1, 0, 0)
    if meta["status"] == "SUCCESS":
        return live <= 1 and (kept, dead) == (0, 0)
    if meta["status"] == "REVOKED":
        return live + kept + dead == 1
    return live == 0 and kept + dead <= 1


def _answer(rid: str, meta: Mapping[str, Any], batch_id: str, life: str) -> Iterator[str]:
    ours = meta["warmq"]
    if ours["batch"] not in (batch_id, None):
        yield f"{rid} was answered for batch {ours['batch']}"
    if meta["status"] == "SUCCESS" and ours["timing"]["life"] != life:
        yield f"{rid} was answered for another life of the batch: {ours['timing']['life']}"


def _counters(
    snap: Snapshot, batch_id: str, batch: Mapping[str, str], total: int, outcomes: Counter[str]
) -> Iterator[str]:
    counted = {name: int(batch.get(name, 0)) for name in OUTCOMES}
    if counted != {name: outcomes[name] for name in OUTCOMES}:
        yield f"counts {counted}, stores {dict(outcomes)}"
    if int(batch.get("total", 0)) != total:
        yield f"total {batch.get('total')} of {total} in its index"
    ended = "sealed" in batch and outcomes.total() == total
    if ended != ("finished_at" in batch):
        yield f"finished is {'finished_at' in batch}, should be {ended}"
    order = Counter(raw.decode() for raw in snap.list(keys.batch_key(batch_id, "finished")))
    if "retried" not in batch and order.total() != outcomes.total():
        yield f"{order.total()} in the order of endings, {outcomes.total()} ended"


def _failures(
    batch_id: str, batch: dict[str, str], metas: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """What fails is counted by code; the first ones failed so."""
    failed = {r: m["warmq"]["error"]["code"] for r, m in metas.items() if m["status"] == "FAILURE"}
    found = failures_of([Batch(batch_id, batch)])
    if {one.code: one.count for one in found} != Counter(failed.values()):
        yield f"counts failures {found}, stores {failed}"
    for one in found:
        if any(failed.get(rid) != one.code for rid in one.first):
            yield f"{one} names requests that did not fail so: {failed}"


def _cut(batch: Mapping[str, str], results: Iterable[bytes]) -> Iterator[str]:
    cut = sum(map(is_cut, results))
    if int(batch.get("cut", 0)) != cut:
        yield f"counts {batch.get('cut')} answers as cut, stores {cut}"


def _plain(rid: str, sent: Sent, where: Messages, results: Mapping[str, bytes]) -> Iterator[str]:
    live, dead = (sum(n for m, n in found.items() if m.id == rid)
                  for found in (where.live, where.dead))  # fmt: skip
    if rid in results or sent.ended or sent.ignored:
        sent.ended = True
        if live > 1:
            yield f"{rid} is there {live} times"
    elif live + dead != 1:
        yield f"{rid} is lost or doubled: {live} live, {dead} dead"
