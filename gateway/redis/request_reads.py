"""Single requests of a batch, for people who look: some that failed, some that run, one whole."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import orjson

from contract import naming
from contract.batch import Batch
from contract.redis import keys
from contract.redis.batches import read_note
from contract.redis.reads import Reads

#: Bytes of results and messages that are read for one look.
MOST_BYTES = 2 * 2**20
#: Workers whose leases are looked at for requests that run.
MOST_WORKERS = 32


class FailedRequest(NamedTuple):
    """A request that ended without an answer. `result` and `message` are empty if they are gone,
    or if there is no room for them in one look."""

    request_id: str
    outcome: str
    result: bytes
    message: bytes


class RunningRequest(NamedTuple):
    """A request that a worker holds; `custom_id` is '' where its message cannot be read."""

    request_id: str
    custom_id: str
    worker: str


class Attempt(NamedTuple):
    """An attempt at a request that brought no answer: when it ended (ms since 1970), whose it was,
    and why: `died` (the engine did), `returned` (its worker gave it back), `lease` (its worker fell
    silent)."""

    at_ms: int
    worker: str
    why: str


class RequestState(NamedTuple):
    """What Redis has of one request: result and message are empty where they are not (any more);
    `outcome` of one that may run again; how often it was handed back, its engine's deaths, and
    which worker holds it ('' : none that was looked at); the last attempts without an answer, the
    oldest first."""

    request_id: str
    result: bytes
    message: bytes
    outcome: str
    returns: int
    deaths: int
    worker: str
    attempts: tuple[Attempt, ...] = ()


class RequestReads(Reads):
    """Reads of one Redis. Each raises StoreUnavailable where it cannot be used."""

    def failed_requests(self, batch_id: str, most: int) -> list[FailedRequest]:
        """Return up to so many requests that RETRY may run again: three round trips."""
        name = keys.batch_key(batch_id, "failed")
        notes = list(islice(self._client.hscan_iter(name, count=most), most))
        asked, room = [], MOST_BYTES
        for request_id, raw in notes:
            outcome, size = read_note(raw)
            room -= size
            asked.append((request_id.decode(), outcome, room >= 0))
        pipe = self._client.pipeline(transaction=False)
        for request_id, _, fits in asked:
            pipe.getrange(keys.result_key(request_id), 0, MOST_BYTES // max(1, most))
            kept = keys.batch_key(batch_id, f"kept:{request_id}")
            pipe.lindex(kept if fits else keys.SCRATCH, 0)
        replies = pipe.execute() if asked else []
        return [
            FailedRequest(
                request_id,
                outcome,
                replies[2 * n] or b"",
                (replies[2 * n + 1] or b"") if fits else b"",
            )
            for n, (request_id, outcome, fits) in enumerate(asked)
        ]

    def running(self, batch: Batch, workers: Iterable[str], most: int) -> list[RunningRequest]:
        """Return some requests of a batch that workers hold, of MOST_WORKERS of the workers."""
        found = list(islice(self._held(batch, workers), most))
        pipe = self._client.pipeline(transaction=False)
        for _, lease, _ in found:
            pipe.lindex(f"warmq:leased:{lease}", 0)
        messages = pipe.execute() if found else []
        return [
            RunningRequest(request_id, _custom_id(message or b""), worker)
            for (request_id, _, worker), message in zip(found, messages, strict=True)
        ]

    def request(self, batch: Batch, custom_id: str, workers: Iterable[str]) -> RequestState | None:
        """Return what there is of a request; None if Redis knows of none: it waits, or is not."""
        request_id = naming.request_id(batch.id, custom_id)
        pipe = self._client.pipeline(transaction=False)
        pipe.getrange(keys.result_key(request_id), 0, MOST_BYTES)
        pipe.hget(keys.batch_key(batch.id, "failed"), request_id)
        pipe.lindex(keys.batch_key(batch.id, f"kept:{request_id}"), 0)
        pipe.hmget(keys.RETURNS, request_id)
        pipe.hmget(keys.DEATHS, request_id)
        pipe.lrange(keys.attempts_key(request_id), 0, -1)
        result, raw, message, (returns,), (deaths,), tried = pipe.execute()
        outcome, _ = read_note(raw) if raw else ("", 0)
        holder = ""
        for held, lease, worker in self._held(batch, workers) if not result else ():
            if held == request_id:
                holder, message = worker, self._client.lindex(f"warmq:leased:{lease}", 0)
                break
        if not (result or raw or message or returns or tried):
            return None
        return RequestState(
            request_id, result or b"", message or b"", outcome, int(returns or 0),
            int(deaths or 0), holder, tuple(_attempts(tried)),
        )  # fmt: skip

    def _held(self, batch: Batch, workers: Iterable[str]) -> Iterable[tuple[str, str, str]]:
        """Yield request id, lease and worker of what workers hold of a batch."""
        ours = [batch.id.encode(), batch.life.encode()]
        for worker in islice(workers, MOST_WORKERS):
            leases: Any = self._client.hgetall(keys.worker_key(worker))
            for lease, record in leases.items():
                parts = record.split(b"\0", 7)
                if parts[6:] == ours:
                    yield parts[5].decode(), lease.decode(), worker


def _attempts(texts: Iterable[bytes]) -> Iterable[Attempt]:
    for text in reversed(list(texts)):
        at_ms, _, rest = text.decode(errors="replace").partition("\0")
        worker, _, why = rest.rpartition("\0")
        if at_ms.isdecimal():
            yield Attempt(int(at_ms), worker, why)


def _custom_id(message: bytes) -> str:
    try:
        return str(orjson.loads(message)["headers"]["warmq"]["custom_id"])
    except (ValueError, TypeError, LookupError):
        return ""
