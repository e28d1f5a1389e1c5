"""Dead letters: requests and messages that were given up, kept for people to inspect."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypedDict

import orjson

from contract.redis import keys
from contract.redis.tenants import Tenants

#: Messages moved by one script, and their bytes: Redis serves nobody else meanwhile.
CHUNK = 500
CHUNK_BYTES = 4 * 2**20
#: A record begins with the time and the message's bytes; one of 0.1.0 with the reason.
_RECORD = re.compile(rb"\d+\0\d+\0")


class DeadLetter(TypedDict):
    """A dead letter; ids are None where unreadable. `at` is in ms, `bytes` the message's size."""

    id: str
    reason: str
    at: int
    bytes: int
    list: str
    request_id: str | None
    batch_id: str | None
    custom_id: str | None


class DeadLetters(Tenants):
    """The dead letters of one Redis. Raises StoreUnavailable where it cannot be used."""

    def dead_letters(self, letter_ids: Iterable[str] | None = None) -> Iterator[DeadLetter]:
        """Yield the dead letters, or the named ones that exist, oldest first, CHUNK at a time."""
        ids = iter(self._dead_ids(letter_ids))
        while page := list(islice(ids, CHUNK)):
            records = self._client.hmget(keys.DEAD, page)
            yield from (
                _letter(i, record) for i, record in zip(page, records, strict=True) if record
            )

    def _dead_ids(self, named: Iterable[str] | None) -> list[str]:
        """Return the named ids, or all; they are numbers, the oldest is the lowest."""
        if named is None:
            named = (name.decode() for name, _ in self._client.hscan_iter(keys.DEAD, count=CHUNK))
        return sorted(set(named), key=lambda letter_id: (len(letter_id), letter_id))

    def dead_message(self, letter_id: str) -> bytes:
        """Return the message of a dead letter; empty if it is gone."""
        return self._client.lindex(keys.dead_key(letter_id), 0) or b""

    def delete_dead(self, letter_ids: Iterable[str] | None = None) -> int:
        """Forget dead letters, by default all; return how many there were."""
        sizes = ((letter_id, 0) for letter_id in self._dead_ids(letter_ids))
        return sum(int(self._run("dead_delete", *ids)) for ids in groups(sizes))


def groups(sizes: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    """Yield the ids in groups that one script may handle; `sizes` pairs id and bytes."""
    group: list[str] = []
    total = 0
    for name, size in sizes:
        if len(group) == CHUNK or (group and total + size > CHUNK_BYTES):
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def _letter(letter_id: str, record: bytes) -> DeadLetter:
    if _RECORD.match(record):
        at, size, home, request_id, batch_id, _, custom_id, reason = record.split(b"\0", 7)
        bytes_, prefix = int(size), ""
    else:  # of 0.1.0, with its message in its record: it can be deleted, not retried
        reason, at, home, message = [*record.split(b"\0", 3), b"", b"", b""][:4]
        request_id, batch_id, custom_id = b"", b"", b"null"
        bytes_, prefix = len(message), "of warmq 0.1.0, retry it with 0.2.0: "
    return {
        "id": letter_id,
        "reason": prefix + reason.decode(errors="replace"),
        "at": int(at) if at.isdigit() else 0,
        "bytes": bytes_,
        "list": home.decode(errors="replace"),
        "request_id": request_id.decode(errors="replace") or None,
        "batch_id": batch_id.decode(errors="replace") or None,
        "custom_id": orjson.loads(custom_id),
    }
