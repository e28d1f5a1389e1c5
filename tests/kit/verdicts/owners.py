"""Whether everything in Redis has an owner or an end; the fault suite's end asks it each time.

Owners are batches that are registered and not retired, workers with leases, the queues, the
operator, who sees the dead letters, and tenants of gateways (gateway_owners.py). What has none must
end by itself: a time to live.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import redis
from kit.protocol.snapshot import Snapshot
from kit.verdicts.gateway_owners import gateway_entries, gateway_keys

from contract import naming
from contract.redis import keys

#: One key each, whatever happens. The entries of some are looked at one by one.
REGISTRIES = {
    keys.LEASE_SEQ, keys.LEASES, keys.WORKERS, keys.RETURNS, keys.DEATHS, keys.DEAD, keys.REVOKED,
    keys.SWEEP, keys.SEQUENCES, keys.BATCHES, keys.RETIRING, keys.TENANTS, keys.REUSED,
    keys.NOTIFY_SIGNING,
}  # fmt: skip
#: Celery's control queue, its bindings, and the replies to `inspect`.
CELERY = re.compile(rb"_kombu\.binding.*|warmq[-:]control.*|.*\.celery\.pidbox")
#: A revocation's time is over: how long its entry may still be there.
REVOKED_GRACE_S = 60


def ownerless(client: redis.Redis) -> dict[str, str]:
    """Return what has neither an owner nor a time to live, with the reason, by key or entry."""
    snap = Snapshot.take(client)
    return ownerless_in(snap) | outlived_in(snap)


def outlived_in(snap: Snapshot) -> dict[str, str]:
    """Return entries that refer to nothing any more; the next sweeps must remove them."""
    return dict(_outlived(snap))


def ownerless_in(snap: Snapshot) -> dict[str, str]:
    """Return what nobody owns and nothing will remove."""
    owned = {name.encode() for name in _owned(snap)}
    unowned = {
        key.decode(errors="replace"): "no owner and no time to live"
        for key in snap.ttl.keys() - owned
        if snap.ttl[key] < 0 and not CELERY.fullmatch(key)
    }
    return unowned | dict(_entries(snap)) | dict(gateway_entries(snap))


def owning_batches(snap: Snapshot) -> list[str]:
    """Return the batches that answer for their keys: not finished, or about to be retired."""
    return [
        batch_id for batch_id in snap.batches()
        if (batch := snap.batch(batch_id))
        and ("finished_at" not in batch or batch_id in snap.hash(keys.RETIRING))
    ]  # fmt: skip


def _owned(snap: Snapshot) -> set[str]:
    owned = set(REGISTRIES)
    for queue in snap.queues():
        suspects = keys.suspects_list(queue)
        owned.update((*naming.priority_lists(queue), suspects, f"{suspects}:group"))
        waiting = snap.turn_lists(queue)
        # A worker that finds a list empty takes it out of the turns.
        owned.update(waiting, snap.turns(queue) if waiting or _any(snap, queue) else ())
    for batch_id in owning_batches(snap):
        owned |= snap.batch_keys(batch_id)
        owned.update(map(keys.result_key, snap.request_ids(batch_id)))
    leases = snap.hash(keys.LEASES)
    for worker in snap.workers():
        # SWEEP finds a worker by any of its leases; a living one asks for those it does not know.
        if not leases.keys().isdisjoint(snap.leases(worker)) or worker in snap.hash(keys.WORKERS):
            owned |= snap.lease_keys(worker)
    owned.update(map(keys.dead_key, snap.dead()))
    return owned | gateway_keys(snap)


def _any(snap: Snapshot, queue: str) -> bool:
    return any(snap.list(key) for key in naming.priority_lists(queue))


def _entries(snap: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield the entries of registries that refer to nothing and have no end."""
    leased = {lease for worker in snap.workers() for lease in snap.leases(worker)}
    for lease in snap.hash(keys.LEASES).keys() - leased:
        yield f"{keys.LEASES} {lease}", "no worker holds it"
    for lease in snap.hash(keys.SEQUENCES).keys() - leased:
        yield f"{keys.SEQUENCES} {lease}", "no worker holds it"
    for batch_id in snap.hash(keys.RETIRING):
        if not snap.batch(batch_id):
            yield f"{keys.RETIRING} {batch_id}", "there is no such batch"
    for name in (keys.RETURNS, keys.DEATHS):
        counted = {request.partition("\0")[0] for request in snap.hash(name)}
        for request in counted - _waiting(snap) if counted else ():
            yield f"{name} {request}", "it neither waits nor runs"


def _outlived(snap: Snapshot) -> Iterator[tuple[str, str]]:
    for batch_id in snap.batches():
        if not snap.batch(batch_id):
            yield f"{keys.BATCHES} {batch_id}", "there is no such batch"
    for number, letter in snap.dead().items():
        if letter.batch and not snap.is_of(letter.batch, letter):
            yield f"{keys.DEAD} {number}", f"its batch {letter.batch} has gone"
    for request, at in snap.hash(keys.REVOKED).items():
        if float(at) < snap.now / 1000 - REVOKED_GRACE_S:
            yield f"{keys.REVOKED} {request}", "its time is over"


def _waiting(snap: Snapshot) -> set[str]:
    leased = (m for worker in snap.workers() for m in snap.leased(worker).values())
    return {message.id for found in (snap.queued(), leased) for message in found}
