"""Who owns what gateways keep in Redis: each of their keys by its name, and entries one by one."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from kit.protocol.snapshot import Snapshot

from gateway.batches.api.record import ENDED
from gateway.redis.api_keys import KEYS
from gateway.redis.webhooks import ENDPOINTS

_BEGIN = "warmq:gateway:"
#: Objects of tenants. They stay until their tenant deletes them, or until their end.
_KINDS = ("file", "upload", "batch", "message_batch")
#: Work that has a time. Whoever looks at it then removes it, or says when the next time is.
_WORK = ("batch", "webhook", "file", "upload", "notify", "response")
_RESERVED, _STORED, _STORED_BY = f"{_BEGIN}reserved", f"{_BEGIN}stored", f"{_BEGIN}stored-by"
_RECORDS = f"{_BEGIN}records"


def gateway_keys(snap: Snapshot) -> set[str]:
    """Return the keys that have an owner, whether they are there or not."""
    owned = {
        KEYS,
        ENDPOINTS,
        _RESERVED,
        _STORED,
        _STORED_BY,
        f"{_BEGIN}listed_until",
        f"{_BEGIN}listed_until:all",
        f"{_BEGIN}batchs:default",
        f"{_BEGIN}store",
    }
    for kind in _KINDS:
        found = objects(snap, kind)
        owned.update(f"{_BEGIN}{kind}:{name}" for name in found)
        owned.update(f"{_BEGIN}{kind}s:{owner}" for owner in found.values())
    files = {*objects(snap, "file"), *snap.hash(f"{_BEGIN}due:file")}
    owned.update(f"{_BEGIN}readers:{name}" for name in files)
    owned.update(f"{_BEGIN}batchs:{tenant}" for tenant in _tenants_of_the_queue(snap))
    for work in _WORK:
        due = f"{_BEGIN}due:{work}"
        owned.update((due, f"{due}:held"))
    for tenant in _texts(snap, _RESERVED).values():
        owned.update((f"{_BEGIN}enqueued:{tenant}", f"{_BEGIN}reserved:{tenant}"))
    owned.update(f"{_STORED}:{tenant}" for tenant in snap.hash(_STORED))
    owned.add(_RECORDS)
    owned.update(f"{_RECORDS}:{tenant}" for tenant in snap.hash(_RECORDS))
    return owned


def gateway_entries(snap: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield entries that refer to nothing and have no end, with the reason.

    Not looked at are entries of lists whose object has expired: they go when the list is read.
    """
    for work in _WORK:
        due = f"{_BEGIN}due:{work}"
        for name in {field.removesuffix("\0again") for field in snap.hash(f"{due}:held")}:
            if name not in snap.hash(due):
                yield f"{due}:held {name}", "held, and not due"
    yield from _reservations(snap)
    yield from _bytes(snap)
    for kind in ("upload", "batch", "message_batch"):
        found = objects(snap, kind)
        for tenant in set(found.values()):
            for name in snap.hash(f"{_BEGIN}{kind}s:{tenant}").keys() - found.keys():
                if kind != "batch" or name not in snap.batches():
                    yield f"{_BEGIN}{kind}s:{tenant} {name}", "there is no such object"
    batches = objects(snap, "batch")
    for name in objects(snap, "message_batch").keys() - batches.keys():
        if name not in snap.hash(f"{_BEGIN}due:batch"):
            yield f"{_BEGIN}message_batch:{name}", "there is no such batch, nor will there be"


def objects(snap: Snapshot, kind: str) -> dict[str, str]:
    """Return the tenants of all objects of a kind that are in their tenant's list."""
    begin, found = f"{_BEGIN}{kind}:".encode(), {}
    for key in snap.held:
        if key.startswith(begin):
            name = key[len(begin) :].decode(errors="replace")
            owner = snap.hash(key.decode(errors="replace")).get("owner", b"").decode()
            # A batch of Anthropic's API is listed as a message batch alone.
            listed = "message_batch" if kind == "batch" and name.startswith("msgbatch_") else kind
            if name in snap.hash(f"{_BEGIN}{listed}s:{owner}"):
                found[name] = owner
    return found


def _texts(snap: Snapshot, key: str) -> dict[str, str]:
    return {name: value.decode() for name, value in snap.hash(key).items()}


def _tenants_of_the_queue(snap: Snapshot) -> set[str]:
    """Return tenants whose lists have batches of `producer submit`; expired ones, too."""
    begin = f"{_BEGIN}batchs:".encode()
    return {key[len(begin) :].decode() for key in snap.held if key.startswith(begin)}


def _reservations(snap: Snapshot) -> Iterator[tuple[str, str]]:
    """Each reservation belongs to a batch or response that has not ended, or whose end is due."""
    due = snap.hash(f"{_BEGIN}due:batch")
    responses = snap.hash(f"{_BEGIN}due:response")
    for batch_id in snap.hash(_RESERVED):
        if batch_id.startswith("resp_"):
            if batch_id not in responses:
                yield f"{_RESERVED} {batch_id}", "nobody will look at its response"
            continue
        document = snap.hash(f"{_BEGIN}batch:{batch_id}").get("document")
        runs = document is not None and orjson.loads(document).get("status") not in ENDED
        if not runs and batch_id not in due:
            yield f"{_RESERVED} {batch_id}", "its batch has ended, or never began"
    held = _texts(snap, _RESERVED)
    for tenant in set(held.values()):
        for batch_id in snap.hash(f"{_BEGIN}reserved:{tenant}"):
            if held.get(batch_id) != tenant:
                yield f"{_BEGIN}reserved:{tenant} {batch_id}", "it is not in the list of all"


def _bytes(snap: Snapshot) -> Iterator[tuple[str, str]]:
    """Bytes are counted of files and uploads that are there, or that somebody will look at."""
    known = {name for kind in ("file", "upload") for name in
             (*objects(snap, kind), *snap.hash(f"{_BEGIN}due:{kind}"))}  # fmt: skip
    for name in snap.hash(_STORED_BY).keys() - known:
        yield f"{_STORED_BY} {name}", "there is no such file"
    counted = _texts(snap, _STORED_BY)
    for tenant in snap.hash(_STORED):
        for name in snap.hash(f"{_STORED}:{tenant}"):
            if counted.get(name) != tenant:
                yield f"{_STORED}:{tenant} {name}", "it is not in the list of all"
