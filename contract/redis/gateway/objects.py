"""Objects of the gateways: documents by kind and id, of one owner each, listed newest first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from contract.redis.reads import Reads

Kind = Literal["file", "upload", "batch", "message_batch"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A document as it was read; `version` counts its writes from 1."""

    id: str
    document: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Page:
    """Documents in the order asked for, and whether there are more after them."""

    objects: list[Stored]
    has_more: bool


class Objects(Reads):
    """Objects in one Redis. Each call raises StoreUnavailable where it cannot be used."""

    def create(
        self, kind: Kind, owner: str, object_id: str, created: int, document: bytes,
        expires_at: int | None = None,
    ) -> bool:  # fmt: skip
        """Write a new object; `created` and `expires_at` are in seconds since 1970.

        Returns:
            Whether it is new: False if there is one of that id.
        """
        return self._put(kind, owner, Stored(object_id, document, 0), created, expires_at) > 0

    def replace(
        self, kind: Kind, owner: str, read: Stored, document: bytes, created: int,
        expires_at: int | None = None,
    ) -> Stored | None:  # fmt: skip
        """Write an object that was `read` before.

        Returns:
            It as it is now; None if somebody else has written or removed it since.
        """
        anew = Stored(read.id, document, read.version)
        version = self._put(kind, owner, anew, created, expires_at)
        return Stored(read.id, document, version) if version else None

    def _put(
        self, kind: Kind, owner: str, anew: Stored, created: int, expires_at: int | None
    ) -> int:
        ends = "" if expires_at is None else expires_at
        return int(self._run(
            "object_put", kind, anew.id, owner, anew.version, created, anew.document, ends
        ))  # fmt: skip

    def get(self, kind: Kind, owner: str, object_id: str) -> Stored | None:
        """Return an owner's object; None if it has none of that id."""
        found = self._client.hmget(
            f"warmq:gateway:{kind}:{object_id}", "owner", "document", "version"
        )
        if found[0] is None or found[0].decode() != owner:
            return None
        return Stored(object_id, found[1], int(found[2]))

    def several(self, kind: Kind, object_ids: Sequence[str]) -> list[Stored | None]:
        """Return objects whoever their owners are, for work that goes on without them.

        One round trip; None for one that is gone.
        """
        pipe = self._client.pipeline(transaction=False)
        for object_id in object_ids:
            pipe.hmget(f"warmq:gateway:{kind}:{object_id}", "document", "version")
        pairs = zip(object_ids, pipe.execute() if object_ids else (), strict=True)
        return [Stored(i, f[0], int(f[1])) if f[0] is not None else None for i, f in pairs]

    def owner_of(self, kind: Kind, object_id: str) -> str | None:
        """Return whose an object is, for work that goes on without its owner; None: it is gone."""
        owner = self._client.hget(f"warmq:gateway:{kind}:{object_id}", "owner")
        return owner.decode() if owner is not None else None

    def note_reader(self, file_id: str, for_ms: int) -> None:
        """Note that somebody reads a file's content, or will, within this time."""
        self._client.set(f"warmq:gateway:read:{file_id}", 1, px=for_ms)

    def has_reader(self, file_id: str) -> bool:
        """Return whether somebody does."""
        return bool(self._client.exists(f"warmq:gateway:read:{file_id}"))

    def delete(self, kind: Kind, owner: str, object_id: str) -> bool:
        """Remove an owner's object; return whether it was there."""
        return bool(self._run("object_delete", kind, object_id, owner))

    def page(
        self, kind: Kind, owner: str, *, after: str = "", limit: int, oldest_first: bool = False
    ) -> Page | None:
        """Return what comes after the object `after` ('' : from the beginning).

        Returns:
            None if the owner has no object of that id.
        """
        more, *flat = self._run("object_page", kind, owner, after, limit, int(oldest_first))
        if more < 0:
            return None
        triples = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        found = [Stored(i.decode(), document, int(version)) for i, version, document in triples]
        return Page(found, bool(more))
