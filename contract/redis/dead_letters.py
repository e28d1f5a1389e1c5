"""Dead letters: requests and messages that were given up, kept for people to look at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from contract.redis import keys
from contract.redis.connect import translated
from contract.redis.scripts import ScriptClient

#: Messages moved by one script, and their bytes: Redis serves nobody else meanwhile.
CHUNK = 500
CHUNK_BYTES = 4 * 2**20


class DeadLetters(ScriptClient):
    """The dead letters of one Redis. Raises StoreUnavailable where it cannot be used."""

    def _hold(self, batch_id: str) -> None:
        """Keep a batch's results from expiring: it is to be opened again (batches.py)."""
        raise NotImplementedError

    def dead_letters(self) -> list[dict[str, Any]]:
        """Return all dead letters without their messages, oldest first.

        Each has id, reason, at (ms), bytes, list, request_id, batch_id and custom_id (None
        where there is none).
        """
        with translated():
            found = dict(self.redis.hscan_iter(keys.DEAD, count=1000))  # it may name one twice
        return [_letter(letter_id, found[letter_id]) for letter_id in sorted(found, key=int)]

    def dead_message(self, letter_id: str) -> bytes:
        """Return the message of a dead letter; empty if it is gone."""
        with translated():
            return self.redis.lindex(keys.dead_key(letter_id), 0) or b""

    def retry_dead(self, letter_ids: Sequence[str]) -> int:
        """Queue dead letters again; return how many could be read and were."""
        wanted = set(letter_ids)
        letters = [letter for letter in self.dead_letters() if letter["id"] in wanted]
        for batch_id in {letter["batch_id"] for letter in letters} - {None}:
            self._hold(batch_id)
        sizes = [(letter["id"], letter["bytes"]) for letter in letters]
        return sum(int(self._run("dead_retry", *ids)) for ids in groups(sizes))

    def delete_dead(self, letter_ids: Sequence[str]) -> int:
        """Forget dead letters; return how many there were."""
        sizes = [(letter_id, 0) for letter_id in letter_ids]
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


def _letter(letter_id: bytes, record: bytes) -> dict[str, Any]:
    at, size, home, request_id, batch_id, _, custom_id, reason = record.split(b"\0", 7)
    return {
        "id": letter_id.decode(),
        "reason": reason.decode(errors="replace"),
        "at": int(at),
        "bytes": int(size),
        "list": home.decode(errors="replace"),
        "request_id": request_id.decode(errors="replace") or None,
        "batch_id": batch_id.decode(errors="replace") or None,
        "custom_id": orjson.loads(custom_id),
    }
