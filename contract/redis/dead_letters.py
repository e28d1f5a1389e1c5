"""Reads and deletes dead letters: messages that no worker runs again, kept with a reason."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypedDict

import orjson

from contract.redis import keys
from contract.redis.tenants import Tenants

#: Most messages that one script moves, because Redis serves no other client meanwhile.
CHUNK = 500
#: Most bytes of messages that one script moves; the first may be larger.
CHUNK_BYTES = 4 * 2**20
#: Matches the beginning of a dead letter's entry, time and bytes of the message. Entries of 0.1.0
#: begin otherwise.
_RECORD = re.compile(rb"\d+\0\d+\0")


class DeadLetter(TypedDict):
    """A dead letter; ids are None if they cannot be read.

    `at` is in ms since 1970. `bytes` is the message's size, `list` the list to which it returns.
    """

    id: str
    reason: str
    at: int
    bytes: int
    list: str
    request_id: str | None
    batch_id: str | None
    custom_id: str | None


class DeadLetters(Tenants):
    """Reads and deletes dead letters. Each call raises StoreUnavailable if Redis cannot be used."""

    def dead_letters(self, letter_ids: Iterable[str] | None = None) -> Iterator[DeadLetter]:
        """Yield the dead letters, or those of `letter_ids` that exist, oldest first."""
        ids = iter(self._dead_ids(letter_ids))
        while group := list(islice(ids, CHUNK)):
            records = self._client.hmget(keys.DEAD, group)
            yield from (
                _letter(i, record) for i, record in zip(group, records, strict=True) if record
            )

    def _dead_ids(self, named: Iterable[str] | None) -> list[str]:
        """Return the named ids, or all, oldest first; ids are numbers that grow."""
        if named is None:
            named = (name.decode() for name, _ in self._client.hscan_iter(keys.DEAD, count=CHUNK))
        return sorted(set(named), key=lambda letter_id: (len(letter_id), letter_id))

    def dead_message(self, letter_id: str) -> bytes:
        """Return the message of a dead letter, b'' if it does not exist."""
        return self._client.lindex(keys.dead_key(letter_id), 0) or b""

    def delete_dead(self, letter_ids: Iterable[str] | None = None) -> int:
        """Delete dead letters, by default all; return the number deleted."""
        sizes = ((letter_id, 0) for letter_id in self._dead_ids(letter_ids))
        return sum(int(self._run("dead_delete", *ids)) for ids in groups(sizes))


def groups(sizes: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    """Yield the ids in groups for one script each; `sizes` has pairs of id and bytes."""
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
    else:  # an entry of 0.1.0 has its message in it; it can be deleted, but not retried
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
