"""Reads and writes the gateways' records: documents about files, uploads and batches.

Records are called objects in the code. An object has a kind, an id and an owner, which is the
tenant's name; each tenant has a list of each kind, sorted by creation.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import orjson

from contract.redis.reads import Reads

#: The key that has the name of the mark in the gateways' store: an empty file by which a gateway
#: checks that its folder or bucket is that of this Redis.
_STORE = "warmq:gateway:store"
#: The statuses of batches that have ended.
ENDED = frozenset(("completed", "failed", "expired", "cancelled"))
#: The answer of the script OBJECT_PAGE if there are more objects than one call may examine.
_MORE_TO_EXAMINE = 3

Kind = Literal["file", "upload", "batch", "message_batch", "response"]


class Stored(NamedTuple):
    """An object as it was read; `version` counts the writes of its document, from 1."""

    id: str
    document: bytes
    version: int


class Page(NamedTuple):
    """Some objects of a list, in the requested order, and whether more follow."""

    objects: list[Stored]
    has_more: bool


class Objects(Reads):
    """Reads and writes objects. Each call raises StoreUnavailable if Redis cannot be used."""

    def create(
        self, kind: Kind, owner: str, object_id: str, created: int, document: bytes,
        expires_at: int | None = None, of_batch: Stored | None = None,
    ) -> bool:  # fmt: skip
        """Write a new object; return False if its id exists or `of_batch` has been changed.

        `created` and `expires_at` are in seconds since 1970.
        """
        new = Stored(object_id, document, 0)
        return self._put(kind, owner, new, created, expires_at, of_batch) > 0

    def replace(
        self, kind: Kind, owner: str, read: Stored, document: bytes, created: int,
        expires_at: int | None = None, of_batch: Stored | None = None,
    ) -> Stored | None:  # fmt: skip
        """Write an object that was `read`; return None if it or `of_batch` has been changed."""
        new = Stored(read.id, document, read.version)
        version = self._put(kind, owner, new, created, expires_at, of_batch)
        return Stored(read.id, document, version) if version else None

    def _put(
        self, kind: Kind, owner: str, new: Stored, created: int, expires_at: int | None,
        of_batch: Stored | None,
    ) -> int:  # fmt: skip
        expires = "" if expires_at is None else expires_at
        batch = (of_batch.id, of_batch.version) if of_batch else ()
        return int(self._run(
            "object_put", kind, new.id, owner, new.version, created, new.document, expires, *batch
        ))  # fmt: skip

    def get(self, kind: Kind, owner: str, object_id: str) -> Stored | None:
        """Return an object of a tenant; None if the tenant has none with this id."""
        found = self._client.hmget(_key(kind, object_id), "owner", "document", "version")
        if found[0] is None or found[0].decode() != owner:
            return None
        return Stored(object_id, found[1], int(found[2]))

    def get_many(self, kind: Kind, object_ids: Sequence[str]) -> list[Stored | None]:
        """Return objects of any tenants, None for a missing one, in one round trip."""
        pipe = self._client.pipeline(transaction=False)
        for object_id in object_ids:
            pipe.hmget(_key(kind, object_id), "document", "version")
        pairs = zip(object_ids, pipe.execute() if object_ids else (), strict=True)
        return [Stored(i, f[0], int(f[1])) if f[0] is not None else None for i, f in pairs]

    def owner_of(self, kind: Kind, object_id: str) -> str | None:
        """Return the tenant of an object, None if the object does not exist."""
        owner = self._client.hget(_key(kind, object_id), "owner")
        return owner.decode() if owner is not None else None

    def store_mark(self) -> str | None:
        """Return the name of the mark in the gateways' store; None if none is recorded."""
        found = self._client.get(_STORE)
        return found.decode() if found is not None else None

    def mark_store(self, name: str) -> str:
        """Record the name of the store's mark, unless one is recorded; return the recorded."""
        self._client.set(_STORE, name, nx=True)
        return self.store_mark() or name

    def note_reader(self, file_id: str, batch_id: str) -> None:
        """Note that a batch reads a file's content until it has ended."""
        self._run("note_reader", file_id, batch_id, 1)

    def forget_reader(self, file_id: str, batch_id: str) -> None:
        """Note that a batch no longer reads a file's content."""
        self._run("note_reader", file_id, batch_id, 0)

    def is_read(self, file_id: str) -> bool:
        """Return whether an unfinished batch reads a file; remove readers that have ended."""
        names = sorted(name.decode() for name in self._client.smembers(_readers_key(file_id)))
        is_read = False
        for name, stored in zip(names, self.get_many("batch", names), strict=True):
            if stored is not None and orjson.loads(stored.document).get("status") not in ENDED:
                is_read = True
            else:
                self.forget_reader(file_id, name)
        return is_read

    def has_reader(self, file_id: str) -> bool:
        """Return whether any batch is noted as a reader of a file, even one that has ended."""
        return bool(self._client.exists(_readers_key(file_id)))

    def delete(self, kind: Kind, owner: str, object_id: str) -> bool:
        """Delete an object of a tenant; return whether it existed."""
        return bool(self._run("object_delete", kind, object_id, owner))

    def page(
        self, kind: Kind, owner: str, *, after: str = "", limit: int, oldest_first: bool = False
    ) -> Page | None:
        """Return the objects after the id `after` ('': from the first).

        Return None if the tenant has no such id.
        """
        found: dict[bytes, Stored] = {}
        place: int | str = ""
        while True:
            asked = (kind, owner, after, limit - len(found), int(oldest_first), place)
            answer, place, *flat = self._run("object_page", *asked)
            if answer < 0:
                return None
            # A new object moves the older ones in the list, so one may come twice.
            for i, version, document in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
                found[i] = Stored(i.decode(), document, int(version))
            if answer != _MORE_TO_EXAMINE:
                return Page(list(found.values()), bool(answer))


def _key(kind: Kind, object_id: str) -> str:
    return f"warmq:gateway:{kind}:{object_id}"


def _readers_key(file_id: str) -> str:
    return f"warmq:gateway:readers:{file_id}"
