"""A small world for the protocol's scripts: workers, batches, plain clients, hostile ones.

Every action is what a worker or a producer does; nothing here knows what must be true.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import redis
from kit.protocol.lessee import LIMITS, QUEUE, SEED, Lease, celery_message, writer
from kit.protocol.snapshot import Snapshot
from kit.protocol.wire import AtOnce, Cut, Fate, Wire, WiredStore, WiredWorker

from contract import naming
from contract.errors import RequestFailed, WarmqError
from contract.index import IndexChunk
from contract.openai.body import CHAT_URL
from contract.redis import keys
from contract.results import failure_meta, is_cut
from worker.drain.sweeper import retire_some

SCRIPTS = (
    "create", "enqueue", "seal", "pop", "done", "release", "renew", "sweep", "bury", "cancel",
    "retry", "hold", "delete", "delete_chunk", "dead_retry", "dead_delete", "retire", "revoke",
    "retry_cut",
)  # fmt: skip
#: Longer than all steps of the clock in one example.
TTL_MS = 10**10
SLOTS = 3
#: So many sweeps put everything back that such a world can have leased.
SWEEPS = 50
SUSPECTS = [keys.suspects_list(QUEUE)]
#: The batch that is cancelled when two of its requests have failed.
STOPS = "b2"
#: How work ends: with an outcome, handed back, or (mostly) with the engine's death.
ENDINGS = (
    "completed", "completed", "cut", "failed", "cancelled", "expired", "returned", "died", "died",
    "died",
)  # fmt: skip


@dataclass(slots=True)
class Sent:
    """What a plain client sent; an `ignored` one wants no result, an `ended` one had its."""

    ignored: bool = False
    ended: bool = False


class World:
    """One Redis, three workers, three batch ids."""

    def __init__(self, client: redis.Redis, shas: dict[str, str]) -> None:
        client.flushall()
        self.client = client
        self.wire = Wire(client, shas)
        self.store = WiredStore(self.wire, ttl_ms=TTL_MS)
        self._names = (f"w{n}" for n in itertools.count())
        self.workers = [self._worker() for _ in range(3)]
        self.plain: dict[str, Sent] = {}
        #: How many messages RETRY_CUT may have added to each request's own, by (id, batch life).
        self.added: Counter[tuple[str, str]] = Counter()
        self.forged = 0

    def _worker(self) -> WiredWorker:
        return WiredWorker(self.wire, next(self._names), TTL_MS)

    def attempt(self, what: Callable[[], object], fate: Fate, spare: int) -> None:
        """Do what a client does, on a network that treats one of its calls so."""
        self.wire.fate, self.wire.spare = fate, spare
        try:
            what()
        except (Cut, WarmqError):
            pass  # the client tells its user, or starts anew: another step
        finally:
            self.wire.fate = Fate.ANSWERED

    def snapshot(self) -> Snapshot:
        """Look at all of Redis."""
        return Snapshot.take(self.client, texts=True)

    def arrive(self, position: int) -> None:
        """Let a command arrive that was sent long ago; nobody waits for its reply."""
        if self.wire.late:
            self.wire.send(*self.wire.late.pop(position % len(self.wire.late)))

    # -- producers --------------------------------------------------------------------

    def submit(self, batch_id: str, lines: int, bad: int, priority: int, *, late: bool) -> None:
        """Create a batch, or go on with it: one chunk of good and bad lines."""
        list_key = naming.turn_list(QUEUE, priority, f"tenant-{priority % 2}", batch_id)
        fields: dict[str, str | int] = {"queue": QUEUE, "list": list_key}
        if batch_id == STOPS:
            fields["stop_after"] = "2"
        _, batch = self.store.create(batch_id, SEED, fields)
        first = batch.number("cursor") + 1
        end = first + lines + bad - 1
        entries = [(line, f"c{line}", False) for line in range(first, end + 1)]
        chunk = IndexChunk(end, f"{end:040x}", entries)
        write = writer(batch, priority=priority, deadline=1.0 if late else None)
        messages, rejects = [], []
        for rid, (line, custom_id, _) in zip(chunk.request_ids(batch_id), entries, strict=True):
            if line < first + lines:
                messages.append(write.write(rid, custom_id, line, CHAT_URL, b'{"prompt":"x"}'))
            else:
                rejects.append((rid, _rejection(batch_id, rid, custom_id, line)))
        before = (batch.number("cursor"), batch.fields["digest"])
        list_key = batch.fields["list"]  # of its first chunk's priority
        self.store.enqueue(batch, list_key, before, chunk, messages, rejects, **LIMITS)

    def seal(self, batch_id: str) -> None:
        """Say that no more lines will come."""
        if batch := self.store.batch(batch_id):
            self.store.seal(batch, (batch.number("cursor"), batch.fields["digest"]))

    def cancel(self, batch_id: str, line: int) -> None:
        """Cancel a batch (line 0) or one request of it."""
        if not (batch := self.store.batch(batch_id)):
            return
        if line == 0:
            self.store.cancel(batch)
        else:
            self.store.cancel_request(batch, f"c{line}")

    def retry(self, batch_id: str, outcomes: Sequence[str]) -> None:
        """Run ended requests again."""
        if batch := self.store.batch(batch_id):
            self.store.retry(batch, outcomes)

    def retry_cut(self, batch_id: str) -> None:
        """Run requests again whose answers were cut off."""
        if not (batch := self.store.batch(batch_id)):
            return
        write, given = writer(batch), []
        for chunk in self.store.index(batch_id):
            ids = chunk.request_ids(batch_id)
            for rid, (line, custom_id, _), raw in zip(
                ids, chunk.entries, self.store.results(ids), strict=True
            ):
                if raw is not None and is_cut(raw):
                    message = write.write(rid, custom_id, line, CHAT_URL, b'{"prompt":"x"}')
                    digest = hashlib.sha1(raw, usedforsecurity=False).hexdigest()
                    given.append((rid, digest, batch.fields["queue"], message))
                    self.added[rid, batch.life] += 1
        if given:
            self.store.retry_cut(batch, given)

    def delete(self, batch_id: str, *, force: bool) -> None:
        """Forget a batch, a finished one unless forced: then it is cancelled first."""
        if force and (batch := self.store.batch(batch_id)) and batch.status != "deleting":
            self.store.cancel(batch)
        self.store.delete(batch_id, force=force)

    def retry_dead(self) -> None:
        """Give all dead letters another life."""
        self.store.retry_dead([letter["id"] for letter in self.store.dead_letters()])

    # -- plain and hostile clients ------------------------------------------------------

    def send(self, priority: int, *, ignored: bool) -> None:
        """Send a request as Celery does."""
        request_id = f"plain-{len(self.plain)}"
        self.plain[request_id] = Sent(ignored)
        message = celery_message(request_id, ignore_result=ignored)
        self.client.lpush(naming.priority_list(QUEUE, priority), message)

    def forge(self, batch_id: str, line: int, kind: int) -> None:
        """Send what claims to be of a batch, or is nothing."""
        rid = naming.request_id(batch_id, f"c{line}")
        self.forged += 1
        ours = {"batch": batch_id, "life": "guessed", "custom_id": f"c{line}", "line": line}
        message = (
            celery_message(rid),
            celery_message(rid, warmq=ours),
            celery_message(f"forged-{self.forged}", warmq=ours),
            b"{}",
        )[kind]
        self.client.lpush(QUEUE, message)

    def revoke(self, batch_id: str, line: int) -> None:
        """Revoke a request through Celery, as worker.drain.leases does."""
        self.wire.run("revoke", 10_800, naming.request_id(batch_id, f"c{line}"))

    # -- workers ----------------------------------------------------------------------

    def pop(
        self, worker: WiredWorker, k: int, max_bytes: int, *, suspects: bool = False
    ) -> list[Lease]:
        """Lease some requests; without a reply the worker does not know of them."""
        lists = SUSPECTS if suspects else ()
        found = worker.pop(k, max_bytes=max_bytes, slots=SLOTS, lists=lists)
        worker.known |= {lease.id: lease for lease in found}
        return found

    def remove_ended(self, position: int, batch_id: str) -> None:
        """Remove what need not run of a batch's lists and of the suspects, as any worker may."""
        lists = [key for _, _, key in self.store.turns(QUEUE) if key.endswith(f"\x06{batch_id}")]
        self.workers[position].remove_ended(*lists, *SUSPECTS)

    def work(self, worker: WiredWorker, k: int, ending: str, *, suspects: bool = False) -> None:
        """Lease some and end them."""
        self._end(worker, self.pop(worker, k, 10**6, suspects=suspects), ending)

    def end(self, worker: WiredWorker, which: int, ending: str) -> None:
        """End some of what a worker has; if the engine died, all of it: the oldest were inside."""
        held = enumerate(worker.known.values())
        chosen = [lease for n, lease in held if ending == "died" or which >> n % 8 & 1]
        self._end(worker, chosen, ending)

    def _end(self, worker: WiredWorker, leases: Sequence[Lease], ending: str) -> None:
        if not leases:
            return
        if ending in ("returned", "died"):
            worker.release(*leases, died=leases[:SLOTS] if ending == "died" else ())
        else:
            answered = ending in ("completed", "cut")
            outcome = "completed" if answered else ending
            worker.done(*leases, outcome=outcome, keep=not answered, cut=ending == "cut")
        for lease in leases:
            worker.known.pop(lease.id, None)

    def renew(self, worker: WiredWorker) -> None:
        """Prolong what is known, forget what is lost, hand back what is unknown."""
        lost, unknown = worker.renew(*worker.known)
        for lease in lost:
            del worker.known[lease]
        if unknown:
            oldest_first = sorted(unknown, key=lambda lease: int(lease.rpartition("/")[2]))
            worker.release(*(Lease(lease, 0, 0, b"") for lease in oldest_first))

    def bury(self, worker: WiredWorker) -> None:
        """Refuse the oldest request that a worker has."""
        for lease in list(worker.known.values())[:1]:
            worker.bury(lease, "cannot be read")
            worker.known.pop(lease.id)

    def fall_silent(self, position: int, *, dies: bool) -> None:
        """Let the leases of a worker end; it may come back, or another is started for it."""
        self._expire(f"{self.workers[position].worker}/")
        if dies:
            self.workers[position] = self._worker()

    def _expire(self, prefix: str = "") -> None:
        held = self.client.zrangebyscore(keys.LEASES, 0, "inf")  # others are on their way back
        if ended := {lease: 1 for lease in held if lease.startswith(prefix.encode())}:
            self.client.zadd(keys.LEASES, ended, xx=True)

    def sweep(self, worker: WiredWorker, limit: int, *, allowed: bool) -> None:
        """Put expired leases back."""
        if allowed:
            worker.allow_sweep()
        worker.sweep(limit=limit)

    def retire(self) -> None:
        """Give finished batches their expiry, and end deletes: the worker's own code."""
        with suppress(StopIteration):
            retire_some(AtOnce(self.wire, TTL_MS)).send(None)

    def time_passes(self, worker: WiredWorker) -> None:
        """Let everything come to its end that has one; workers retire and sweep all the while."""
        if waiting := self.client.zrange(keys.RETIRING, 0, -1):
            self.client.zadd(keys.RETIRING, dict.fromkeys(waiting, 1))  # nothing is held any more
            self.retire()
            self.retire()  # a message may have been kept since the first one began
        for key in self.client.scan_iter():
            if self.client.pttl(key) > 0:
                self.client.delete(key)
        worker.allow_sweep()
        worker.sweep()

    # -- the end ----------------------------------------------------------------------

    def come_to_an_end(self) -> list[str]:
        """Let everything come to its end without further faults; return what is left then."""
        worker = self._worker()
        self.wire.late.clear()
        self._expire()
        for _ in range(SWEEPS):
            worker.allow_sweep()
            worker.sweep()
            if not self.client.exists(keys.LEASES):
                break
        while leases := worker.pop() or worker.pop(lists=SUSPECTS):
            worker.done(*leases)
        batches = self.store.batches()
        for batch in batches:
            self.seal(batch.id)
        unfinished = [
            b.id for b in self.store.batches() if not b.finished and b.status != "deleting"
        ]
        self.delete("b0", force=False)
        self.time_passes(worker)
        self.store.delete_dead([letter["id"] for letter in self.store.dead_letters()])
        fixed = {keys.LEASE_SEQ, keys.WORKERS, keys.SWEEP, keys.REVOKED}
        left = {key.decode() for key in self.client.scan_iter()} - fixed
        return [f"{batch_id} is not finished" for batch_id in unfinished] + sorted(left)


def _rejection(batch_id: str, rid: str, custom_id: str, line: int) -> bytes:
    error = RequestFailed("no JSON", code="invalid_json")
    return failure_meta(rid, error, batch=batch_id, custom_id=custom_id, line=line)
