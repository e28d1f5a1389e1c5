"""Keeps background responses in Redis: their records, requests, results and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from contract.redis import keys
from contract.redis.reads import PAGE, Reads

#: Seconds for which the ids of running requests are cached.
RUNNING_S = 1.0
_PREFIX = "resp_"


def request_id_of(response_id: str) -> str:
    """Return the id of a response's request; workers make the response's id from it."""
    return response_id.removeprefix(_PREFIX)


def response_key(response_id: str) -> str:
    """Return the key of a response's record."""
    return f"warmq:gateway:response:{response_id}"


class StoredResponse(NamedTuple):
    """A response as it was read; `result` is b'' without one.

    `noted`: a gateway has noted the end, so the record expires. `pushed`: the request was queued.
    """

    id: str
    owner: str
    document: bytes
    pushed: bool
    cancelled: bool
    noted: bool
    result: bytes

    @property
    def ended(self) -> bool:
        """Whether the response has a result or is cancelled."""
        return self.cancelled or bool(self.result)


class BackgroundResponses(Reads):
    """Reads and writes background responses. Each call raises StoreUnavailable."""

    _lock = threading.Lock()
    _running: frozenset[str] = frozenset()
    _running_at = float("-inf")

    def create(
        self, response_id: str, owner: str, created: int, document: bytes, body: bytes, *,
        life_ms: int, look_ms: int,
    ) -> bool:  # fmt: skip
        """Write a new record, due in `look_ms`, removed after `life_ms`; False if the id exists."""
        args = (response_id, owner, created, document, body, life_ms, look_ms)
        return bool(self._run("response_create", *args))

    def push(
        self, response_id: str, list_key: str, message: bytes, *, high_water: float,
        high_water_requests: int,
    ) -> str:  # fmt: skip
        """Queue the request, unless that was done; return the reason if the queue is full, or ''.

        A request whose record is deleted or cancelled is not queued.
        """
        args = (response_id, list_key, message, high_water_requests, high_water)
        reply = self._run("response_push", *args)
        return reply.decode() if isinstance(reply, bytes) else ""

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response of any tenant, None if it does not exist."""
        pipe = self._client.pipeline(transaction=False)
        # The record is read first: it is removed before the result.
        fields = ("owner", "document", "pushed", "cancelled", "ended")
        pipe.hmget(response_key(response_id), *fields)
        pipe.get(keys.result_key(request_id_of(response_id)))
        (owner, document, pushed, cancelled, noted), result = pipe.execute()
        if owner is None:
            return None
        return StoredResponse(
            response_id, owner.decode(), document, bool(pushed), bool(cancelled), bool(noted),
            result or b"",
        )  # fmt: skip

    def body(self, response_id: str) -> bytes:
        """Return the body of a response's request, b'' if the response does not exist."""
        return self._client.hget(response_key(response_id), "body") or b""

    def cancel(self, response_id: str, owner: str, *, keep_ms: int, revoked_s: int) -> bool:
        """Cancel a response that has not ended; return whether the owner has such a response."""
        args = (response_id, owner, request_id_of(response_id), keep_ms, revoked_s)
        return int(self._run("response_cancel", *args)) >= 0

    def note_end(self, response_id: str) -> None:
        """Let the record of a response with a result expire with that result."""
        self._run("response_ended", response_id, request_id_of(response_id))

    def delete_result(self, response_id: str) -> None:
        """Remove a response's result."""
        self._client.unlink(keys.result_key(request_id_of(response_id)))

    def over(self, response_ids: Sequence[str]) -> list[bool]:
        """Return for each response whether it has ended, or does not exist."""
        found: list[bool] = []
        for start in range(0, len(response_ids), PAGE):
            pipe = self._client.pipeline(transaction=False)
            for response_id in response_ids[start : start + PAGE]:
                pipe.hmget(response_key(response_id), "owner", "cancelled")
                pipe.exists(keys.result_key(request_id_of(response_id)))
            flat = pipe.execute()
            for (owner, cancelled), has_result in zip(flat[::2], flat[1::2], strict=True):
                found.append(owner is None or bool(cancelled) or bool(has_result))
        return found

    def running(self) -> frozenset[str]:
        """Return the ids of all requests that workers run now, read at most every RUNNING_S."""
        with self._lock:
            if time.monotonic() - self._running_at >= RUNNING_S:
                self._running = frozenset(self._leased())
                self._running_at = time.monotonic()
            return self._running

    def _leased(self) -> list[str]:
        leases = self._client.zrevrange(keys.LEASES, 0, -1, withscores=True)
        # A lease with a negative score is returning to its queue (contract/lua/leases.lua).
        running = {lease for lease, ends in leases if ends > 0}
        workers = sorted({lease.rpartition(b"/")[0].decode() for lease in running})
        records = self._each("hgetall", [keys.worker_key(worker) for worker in workers])
        return [
            record.split(b"\0", 7)[5].decode(errors="replace")
            for leased in records
            for lease, record in leased.items()
            if lease in running
        ]
