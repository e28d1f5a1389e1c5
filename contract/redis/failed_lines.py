"""Requests of a batch that failed and may run again: some of them, for people who look."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from contract.redis import keys
from contract.redis.reads import Reads

#: Bytes of results and messages that are read for one look.
MOST_BYTES = 2 * 2**20


class FailedRequest(NamedTuple):
    """A request that ended without an answer. `result` and `message` are empty if they are gone,
    or if there is no room for them in one look."""

    request_id: str
    outcome: str
    result: bytes
    message: bytes


class FailedLines(Reads):
    """Reads of one Redis. Each raises StoreUnavailable where it cannot be used."""

    def failed_requests(self, batch_id: str, most: int) -> list[FailedRequest]:
        """Return up to so many requests that RETRY may run again: three round trips."""
        name = keys.batch_key(batch_id, "failed")
        notes = list(islice(self._client.hscan_iter(name, count=most), most))
        asked, room = [], MOST_BYTES
        for request_id, note in notes:
            size = int(note.split(b"\0")[1] or 0) if b"\0" in note else 0
            room -= size
            asked.append((request_id.decode(), note.split(b"\0")[0].decode(), room >= 0))
        pipe = self._client.pipeline(transaction=False)
        for request_id, _, fits in asked:
            pipe.getrange(keys.result_key(request_id), 0, MOST_BYTES // max(1, most))
            kept = keys.batch_key(batch_id, f"kept:{request_id}")
            pipe.lindex(kept if fits else keys.SCRATCH, 0)
        replies = pipe.execute() if asked else []
        return [
            FailedRequest(request_id, outcome, replies[2 * n] or b"", replies[2 * n + 1] or b"")
            for n, (request_id, outcome, _) in enumerate(asked)
        ]
