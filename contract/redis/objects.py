"""Objects of the gateways: documents by kind and id, with one owner each, listed newest first."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import orjson

from contract.redis.reads import Reads

_STORE = "warmq:gateway:store"
#: Statuses of batches that have ended.
ENDED = frozenset(("completed", "failed", "expired", "cancelled"))
#: OBJECT_PAGE has examined as many objects as one call may; there are more.
_MORE_TO_EXAMINE = 3

Kind = Literal["file", "upload", "batch", "message_batch"]


class Stored(NamedTuple):
    """A document as it was read; `version` counts its writes from 1."""

    id: str
    document: bytes
    version: int


class Page(NamedTuple):
    """Documents in the order asked for, and whether there are more after them."""

    objects: list[Stored]
    has_more: bool


class Objects(Reads):
    """Objects in one Redis. Each call raises StoreUnavailable where it cannot be used."""

    def create(
        self, kind: Kind, owner: str, object_id: str, created: int, document: bytes,
        expires_at: int | None = None, of_batch: Stored | None = None,
    ) -> bool:  # fmt: skip
        """Write a new object; False if its id exists, or `of_batch` has changed since.

        `created` and `expires_at` are in seconds since 1970.
        """
        anew = Stored(object_id, document, 0)
        return self._put(kind, owner, anew, created, expires_at, of_batch) > 0

    def replace(
        self, kind: Kind, owner: str, read: Stored, document: bytes, created: int,
        expires_at: int | None = None, of_batch: Stored | None = None,
    ) -> Stored | None:  # fmt: skip
        """Write an object that was `read`; None if it, or `of_batch`, has changed since."""
        anew = Stored(read.id, document, read.version)
        version = self._put(kind, owner, anew, created, expires_at, of_batch)
        return Stored(read.id, document, version) if version else None

    def _put(
        self, kind: Kind, owner: str, anew: Stored, created: int, expires_at: int | None,
        of_batch: Stored | None,
    ) -> int:  # fmt: skip
        ends = "" if expires_at is None else expires_at
        batch = (of_batch.id, of_batch.version) if of_batch else ()
        return int(self._run(
            "object_put", kind, anew.id, owner, anew.version, created, anew.document, ends, *batch
        ))  # fmt: skip

    def get(self, kind: Kind, owner: str, object_id: str) -> Stored | None:
        """Return an owner's object; None if it has none of that id."""
        found = self._client.hmget(_key(kind, object_id), "owner", "document", "version")
        if found[0] is None or found[0].decode() != owner:
            return None
        return Stored(object_id, found[1], int(found[2]))

    def get_many(self, kind: Kind, object_ids: Sequence[str]) -> list[Stored | None]:
        """Return objects of any owners, None for one that is gone: one round trip."""
        pipe = self._client.pipeline(transaction=False)
        for object_id in object_ids:
            pipe.hmget(_key(kind, object_id), "document", "version")
        pairs = zip(object_ids, pipe.execute() if object_ids else (), strict=True)
        return [Stored(i, f[0], int(f[1])) if f[0] is not None else None for i, f in pairs]

    def owner_of(self, kind: Kind, object_id: str) -> str | None:
        """Return an object's owner; None: it is gone."""
        owner = self._client.hget(_key(kind, object_id), "owner")
        return owner.decode() if owner is not None else None

    def store_mark(self) -> str | None:
        """Return the name of the content that marks the gateways' store; None before it exists."""
        found = self._client.get(_STORE)
        return found.decode() if found is not None else None

    def mark_store(self, name: str) -> str:
        """Record the name of that content, unless there is one; return the recorded name."""
        self._client.set(_STORE, name, nx=True)
        return self.store_mark() or name

    def note_reader(self, file_id: str, batch_id: str) -> None:
        """Note that a batch reads a file's content until it has ended."""
        self._run("note_reader", file_id, batch_id, 1)

    def forget_reader(self, file_id: str, batch_id: str) -> None:
        """Note that a batch no longer reads a file's content."""
        self._run("note_reader", file_id, batch_id, 0)

    def is_read(self, file_id: str) -> bool:
        """Return whether an unended batch reads a content; forget readers that have ended."""
        names = sorted(name.decode() for name in self._client.smembers(_readers_key(file_id)))
        reads = False
        for name, stored in zip(names, self.get_many("batch", names), strict=True):
            if stored is not None and orjson.loads(stored.document).get("status") not in ENDED:
                reads = True
            else:
                self.forget_reader(file_id, name)
        return reads

    def has_reader(self, file_id: str) -> bool:
        """Return whether any reader is noted, ended or not."""
        return bool(self._client.exists(_readers_key(file_id)))

    def delete(self, kind: Kind, owner: str, object_id: str) -> bool:
        """Remove an owner's object; return whether it existed."""
        return bool(self._run("object_delete", kind, object_id, owner))

    def page(
        self, kind: Kind, owner: str, *, after: str = "", limit: int, oldest_first: bool = False
    ) -> Page | None:
        """Return the objects after `after` ('': from the first); None if it does not exist."""
        found: dict[bytes, Stored] = {}
        place: int | str = ""
        while True:
            asked = (kind, owner, after, limit - len(found), int(oldest_first), place)
            answer, place, *flat = self._run("object_page", *asked)
            if answer < 0:
                return None
            # New objects move the places: one may come twice.
            for i, version, document in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
                found[i] = Stored(i.decode(), document, int(version))
            if answer != _MORE_TO_EXAMINE:
                return Page(list(found.values()), bool(answer))


def _key(kind: Kind, object_id: str) -> str:
    return f"warmq:gateway:{kind}:{object_id}"


def _readers_key(file_id: str) -> str:
    return f"warmq:gateway:readers:{file_id}"
