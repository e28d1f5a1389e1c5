"""Reads a batch's requests: those in flight, or all data of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import orjson

from contract.batch import Batch
from contract.redis import keys
from contract.redis.announcements import is_alive, is_silent
from contract.redis.batches import read_note
from producer.lost_leases import LostLeaseReads

Worker = Mapping[str, Any]

#: Most bytes of a result, and most workers whose leases a page reads.
MOST_BYTES, MOST_WORKERS = 2 * 2**20, 32


class RunningRequest(NamedTuple):
    """A request in flight; `custom_id` is '' if its message cannot be read."""

    request_id: str
    custom_id: str
    worker: str


class Attempt(NamedTuple):
    """An attempt without an answer: its end (ms since 1970), worker, and reason.

    `why` is `died` (the engine died), `returned` (by the worker) or `lease` (the lease expired).
    """

    at_ms: int
    worker: str
    why: str


class RequestState(NamedTuple):
    """The data that Redis has of one request; missing bytes are empty.

    `outcome` is set if it may run again. `returns` counts how often it was handed back, `deaths`
    the deaths of its engines. `worker` has the request ('' if none was found). `attempts` has its
    last attempts, oldest first.
    """

    request_id: str
    result: bytes
    message: bytes
    outcome: str
    returns: int
    deaths: int
    worker: str
    attempts: tuple[Attempt, ...] = ()

    @property
    def deliveries(self) -> int:
        """How often the request was delivered; the number of the last attempt."""
        return self.returns + bool(self.worker)


def state_at(worker: Worker | None) -> str:
    """Return the state of a request that has not ended; `worker` has it, None for nobody."""
    if worker is None or not is_alive(worker):
        return "waiting"
    return "silent" if is_silent(worker) else "running"


class RequestReads(LostLeaseReads):
    """Front ends count as workers here: each has requests of its own."""

    def living(self) -> list[str]:
        """Return the ids of living workers."""
        return [str(one["id"]) for one in self.announcements(merged=False) if is_alive(one)]

    def holders(self) -> dict[str, Worker | None]:
        """Return the announcements of workers that may have requests, by their ids.

        A dead one has them until the end of their leases, but perhaps no announcement any more.
        """
        lost = (name for one in self.lost_leases().values() for name in one.workers)
        announced = {str(one["id"]): one for one in self.announcements(merged=False)}
        return dict.fromkeys(lost) | announced

    def retryable(self, batch_id: str) -> int:
        """Return the number of ended requests that RETRY may run again."""
        return int(self._client.hlen(keys.batch_key(batch_id, "failed")))

    def running(self, batch: Batch, workers: Iterable[str], most: int) -> list[RunningRequest]:
        """Return some requests of a batch that are in flight in the first MOST_WORKERS workers."""
        leased = list(islice(self._leased(batch, islice(workers, MOST_WORKERS)), most))
        pipe = self._client.pipeline(transaction=False)
        for _, lease, _ in leased:
            pipe.lindex(f"warmq:leased:{lease}", 0)
        messages = pipe.execute() if leased else []
        return [
            RunningRequest(request_id, _custom_id(message or b""), worker)
            for (request_id, _, worker), message in zip(leased, messages, strict=True)
        ]

    def request(self, batch: Batch, request_id: str, workers: Iterable[str]) -> RequestState | None:
        """Return a request's data; None if Redis has none: it waits, or is unknown."""
        pipe = self._client.pipeline(transaction=False)
        pipe.getrange(keys.result_key(request_id), 0, MOST_BYTES)
        pipe.hget(keys.batch_key(batch.id, "failed"), request_id)
        pipe.lindex(keys.batch_key(batch.id, f"kept:{request_id}"), 0)
        pipe.hmget(keys.RETURNS, request_id)
        pipe.hmget(keys.DEATHS, request_id)
        pipe.lrange(keys.attempts_key(request_id), 0, -1)
        result, raw, message, (returns,), (deaths,), attempts = pipe.execute()
        outcome, _ = read_note(raw) if raw else ("", 0)
        holder = ""
        for leased_id, lease, worker in self._leased(batch, workers) if not result else ():
            if leased_id == request_id:
                holder, message = worker, self._client.lindex(f"warmq:leased:{lease}", 0)
                break
        if not (result or raw or message or returns or attempts):
            return None
        return RequestState(
            request_id, result or b"", message or b"", outcome, int(returns or 0),
            int(deaths or 0), holder, tuple(_attempts(attempts)),
        )  # fmt: skip

    def _leased(self, batch: Batch, workers: Iterable[str]) -> Iterable[tuple[str, str, str]]:
        """Yield request id, lease and worker of a batch's requests in flight."""
        ours = [batch.id.encode(), batch.life.encode()]
        for worker in workers:
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
