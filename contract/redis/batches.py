"""Submits, reads and changes batches in Redis.

Every call may be repeated. Scripts work on one chunk of a batch at a time, so that none blocks
Redis for long.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import orjson
import redis
from redis.exceptions import BusyLoadingError
from redis.retry import Retry

from contract.batch import BY_USER, Batch
from contract.errors import BatchConflict, RequestFailed, StoreUnavailable, StoreUnreachable
from contract.index import IndexChunk, IndexEntry, entry_request_id, leader_of
from contract.naming import did_you_mean
from contract.redis import keys
from contract.redis.connect import connect, masked
from contract.redis.dead_letters import CHUNK, DeadLetters, groups
from contract.redis.enqueued import Enqueued, by_list
from contract.redis.reads import Reads
from contract.redis.runs import Runs
from contract.results import failure_meta

#: Answers of scripts. NOT_HELD: RETIRE has set times to live, which HOLD must remove. CANCELLING:
#: the batch is being cancelled.
NOT_HELD, CANCELLING = -2, -3
#: Most creations of a batch that is gone when it is read.
_CREATIONS = 10
#: Seconds before each further try to reach Redis, since the first connection may have been reset.
_WAITS_S = (0.05, 0.1, 0.4)
#: Bytes of a reply with results from which the next MGET asks for half as many results.
REPLY_BYTES = 16 * 2**20
#: Most custom_ids of a batch that are compared with a misspelt one.
NEAR_AMONG = 20_000


class BatchStore(DeadLetters):
    """Submits, reads and changes batches. Raises StoreUnavailable if Redis cannot be used."""

    def __init__(self, client: redis.Redis, *, ttl_ms: int) -> None:
        super().__init__(client)
        self._ttl_ms = ttl_ms
        #: The number of results of one MGET; it is halved if results are large.
        self._results_at_once = CHUNK

    @classmethod
    def open(
        cls, url: str, name: str, *, ttl_ms: int, timeout_s: float | None = None,
        retry: Retry | None = None,
    ) -> BatchStore:  # fmt: skip
        """Return a BatchStore for a URL, after a PING.

        With `timeout_s` no call takes longer, and none is retried. `retry` repeats the calls of a
        Redis that answers at first, or that loads its data.

        Raises:
            StoreUnavailable: Redis does not answer; the message has the URL without password.
        """
        try:
            unretried = cls(connect(url, name, retries=0, timeout_s=timeout_s), ttl_ms=ttl_ms)
            try:
                _reach(unretried, () if timeout_s is not None else _WAITS_S)
            except StoreUnreachable as error:
                if retry is None or not isinstance(error.__cause__, BusyLoadingError):
                    raise
            if timeout_s is not None:
                return unretried
            return cls(connect(url, name, retry=retry), ttl_ms=ttl_ms)
        except StoreUnavailable as error:
            raise type(error)(f"{masked(url)}: {error.message}") from None
        except ValueError:
            # The text of redis-py's error may have a part of the password.
            raise StoreUnavailable(
                f"{masked(url)}: not a Redis URL; in WARMQ_REDIS_URL, percent-encode special "
                "characters of the password"
            ) from None

    def index(self, batch_id: str, start: int = 0) -> Iterator[IndexChunk]:
        """Yield the chunks of a batch's index that exist now, in the order of lines."""
        key = keys.batch_key(batch_id, "index")
        while True:
            raws = self._client.lrange(key, start, start + 7)
            yield from (IndexChunk.load(raw) for raw in raws)
            if len(raws) < 8:
                return
            start += 8

    def finished_ids(self, batch_id: str, start: int, count: int) -> list[str]:
        """Return entries of the list of finished requests (index.read_ending); -1 is the last."""
        raws = self._client.lrange(keys.batch_key(batch_id, "finished"), start, start + count - 1)
        return [raw.decode() for raw in raws]

    def followers(
        self, batch_id: str, of: Iterable[tuple[str, range]]
    ) -> Iterator[IndexEntry | None]:
        """Yield the index entries of followers, by leader and numbers; None for a missing one."""
        key = keys.batch_key(batch_id, "identical")
        wanted = ((leader, f"{leader}\0{n}") for leader, numbers in of for n in numbers)
        while group := list(islice(wanted, CHUNK)):
            raws = self._client.hmget(key, [field for _, field in group])
            for (leader, _), raw in zip(group, raws, strict=True):
                yield (*orjson.loads(raw), leader) if raw else None

    def columns(self, batch_id: str, line: int) -> Iterator[bytes]:
        """Yield the kept columns of chunks whose greatest line is at least `line`."""
        key, start = keys.batch_key(batch_id, "columns"), 0
        while raws := self._client.zrangebyscore(key, line, "+inf", start, 1):
            yield from raws
            start += 1

    def results(self, request_ids: Sequence[str]) -> list[bytes | None]:
        """Return the stored results, None for a request without one."""
        found: list[bytes | None] = []
        while len(found) < len(request_ids):
            part = request_ids[len(found) : len(found) + self._results_at_once]
            raws: list[bytes | None] = self._client.mget([keys.result_key(i) for i in part])
            found += raws
            if sum(len(raw) for raw in raws if raw) > REPLY_BYTES:
                self._results_at_once = max(1, len(part) // 2)
        return found

    def note_collected(self, batch: Batch) -> None:
        """Note that a finished batch's results were collected; no expiry warning is needed."""
        self._run("collected", batch.id, batch.life)

    def note_written(self, batch: Batch, fingerprints: Sequence[str]) -> None:
        """Note the fingerprints of the files into which a batch's results were written."""
        self._run("collected", batch.id, batch.life, *fingerprints)

    def find(self, batch: Batch, custom_id: str) -> tuple[IndexEntry, str]:
        """Return index entry and request id of a custom_id, the first if it is not unique.

        Raises:
            BatchConflict: the batch has no such request.
        """
        first_ids: list[str] = []
        for chunk in self.index(batch.id):
            for entry in chunk.entries:
                if entry[1] == custom_id:
                    return entry, entry_request_id(batch.id, entry)
            if len(first_ids) < NEAR_AMONG:
                first_ids += [entry[1] for entry in chunk.entries]
        hint = did_you_mean(custom_id, first_ids)
        raise BatchConflict(f"batch {batch.id} has no request {custom_id!r}{hint}")

    def custom_id_of(self, batch: Batch, request_id: str) -> str:
        """Return the custom_id of a request of the batch."""
        for chunk in self.index(batch.id):
            ids = chunk.request_ids(batch.id)
            if request_id in ids:
                return chunk.entries[ids.index(request_id)][1]
        raise BatchConflict(f"batch {batch.id} has no request {request_id}")

    def create(
        self, batch_id: str, seed: str, fields: dict[str, str | int], *, deadline: str = ""
    ) -> tuple[bool, Batch]:
        """Create the batch unless it exists; return whether it is new, and its state.

        `deadline` is a time in ms since 1970, or `+n`, ms after the creation.
        """
        flat = [part for pair in fields.items() for part in pair]
        life = secrets.token_urlsafe(12)
        for _ in range(_CREATIONS):
            while (new := self._run("create", batch_id, life, seed, deadline, *flat)[0]) < 0:
                self._delete_chunks(batch_id)  # an interrupted delete has left results
            batch = self.batch(batch_id)
            if batch is not None:
                return bool(new), batch
            # Redis has lost it, or it was deleted, which could have come before the creation.
        raise BatchConflict(f"batch {batch_id} was deleted meanwhile")

    def enqueue(
        self,
        batch: Batch,
        list_key: str,
        before: tuple[int, str],
        chunk: IndexChunk,
        messages: Sequence[bytes],
        rejects: Sequence[tuple[str, bytes]],
        *,
        high_water: float,
        high_water_requests: int,
        announced: int = 0,
        columns: bytes = b"",
        queues: Sequence[str] = (),
        known: bytes = b"",
    ) -> Enqueued:
        """Append one chunk; `before` is the (cursor, digest) of the chunk that it follows.

        `columns` are the kept columns of its lines: the greatest line number, a line feed, any
        bytes. A chunk of a planned batch has no messages: `announced` is the number of messages
        that `enqueue_planned` appends for it. `queues` has the queue of each message, if they are
        not all the list's. `known` has the lines that known answers answer (enqueue.lua).
        """
        lists, sent = by_list(list_key, messages, queues)
        sent = b"=%d" % announced if announced else sent
        flat = [part for pair in rejects for part in pair]
        reply = self._run(
            "enqueue", batch.id, batch.life, lists, *before, chunk.cursor, chunk.digest,
            chunk.dump(), high_water_requests, high_water, sent, columns, known, *flat,
        )  # fmt: skip
        return Enqueued.of(reply)

    def enqueue_planned(
        self,
        batch: Batch,
        list_key: str,
        end: tuple[int, str],
        plan: str,
        position: int,
        messages: Sequence[bytes],
        *,
        high_water: float,
        high_water_requests: int,
        queues: Sequence[str] = (),
    ) -> Enqueued:
        """Append messages from `position` of a batch's `plan`; its index must have all lines."""
        lists, sent = by_list(list_key, messages, queues)
        return Enqueued.of(self._run(
            "enqueue_planned", batch.id, batch.life, lists, *end, plan, position,
            high_water_requests, high_water, sent,
        ))  # fmt: skip

    def seal(
        self, batch: Batch, end: tuple[int, str], reason: str = "", expected: bytes = b""
    ) -> Enqueued:
        """Mark the batch as completely submitted; `end` is the last chunk's (cursor, digest)."""
        return Enqueued.of(self._run("seal", batch.id, batch.life, *end, reason, expected))

    def limit_failures(self, batch: Batch, stop_after: str) -> None:
        """Change the number or share of failures at which the batch is cancelled; '' for never."""
        self._run("limit_failures", batch.id, batch.life, stop_after)

    def cancel(self, batch: Batch, reason: str = BY_USER) -> int:
        """Cancel all open requests; return their number, with those that workers ended."""
        if batch.is_run:
            self.begin_cancel(batch)
            return sum(self.cancel(window, reason) for window in batch.windows)
        error = RequestFailed(reason, code="cancelled")
        count = self.begin_cancel(batch, reason) + self._end_all(batch, error)
        after = self.batch(batch.id)
        if after is None or after.life != batch.life:  # deleted meanwhile
            return count
        return max(count, after.number("cancelled") - batch.number("cancelled"))

    def begin_cancel(self, batch: Batch, reason: str = BY_USER) -> int:
        """Abort running requests and let none begin; `cancel` also ends those that wait."""
        if batch.is_run:
            # First the record, so that no other window is submitted. A stopped run may go on.
            if batch.stopped or not batch.finished:
                Runs.using(self).note(batch, {"cancelling": 1}, ends=True)
            return sum(self.begin_cancel(window, reason) for window in batch.windows)
        stopped = "" if reason == BY_USER else reason
        return max(0, int(self._run("cancel", batch.id, batch.life, 1, self._ttl_ms, stopped)))

    def expire(self, batch: Batch) -> int:
        """End the open requests of a batch whose deadline has passed; return their number."""
        error = RequestFailed("not finished before its deadline", code="expired")
        return self._end(batch, error, [], []) + self._end_all(batch, error)

    def cancel_request(self, batch: Batch, custom_id: str) -> int:
        """Cancel one request with its followers; return their number, 0 if it has ended.

        Raises:
            BatchConflict: the request does not exist, or is a follower of another.
        """
        entry, rid = self.find(batch, custom_id)
        if leader := leader_of(entry):
            name = self.custom_id_of(batch, leader)
            raise BatchConflict(
                f"request {custom_id!r} of batch {batch.id} is answered by request {name!r}, whose "
                f"body is the same: cancel {name!r}, which ends all lines with that body"
            )
        error = RequestFailed(BY_USER, code="cancelled")
        return self._end(batch, error, [entry], [rid])

    def _end_all(self, batch: Batch, error: RequestFailed) -> int:
        return sum(
            self._end(batch, error, chunk.entries, chunk.request_ids(batch.id))
            for chunk in self.index(batch.id)
        )

    def _end(
        self, batch: Batch, error: RequestFailed, entries: Sequence[IndexEntry], ids: Sequence[str]
    ) -> int:
        args: list[str | bytes] = []
        for entry, rid in zip(entries, ids, strict=True):
            if not leader_of(entry):  # a follower ends with its leader
                line, name, _ = entry[:3]
                meta = failure_meta(
                    rid, error, batch=batch.id, custom_id=name, line=line, revoked=True
                )
                args += (rid, meta)
        flag = "expired" if error.code == "expired" else 0
        return max(0, int(self._run("cancel", batch.id, batch.life, flag, self._ttl_ms, *args)))

    def retry(self, batch: Batch, outcomes: Sequence[str]) -> int:
        """Queue ended requests with one of the outcomes again; return their number."""
        wanted = {rid: note for rid, note in self._ended(batch) if note[0] in outcomes}
        if not wanted:
            return 0
        self.hold(batch.id)
        count = 0
        for ids in groups((rid, size) for rid, (_, size) in wanted.items()):
            pairs = [part for rid in ids for part in (rid, wanted[rid][0])]
            while (done := self._run("retry", batch.id, batch.life, *pairs)) == NOT_HELD:
                self.hold(batch.id)
            count += max(0, int(done))
        return count

    def retryable(self, batch: Batch) -> Counter[str]:
        """Return by outcome the numbers of ended requests that `retry` can queue again."""
        return Counter(outcome for _, (outcome, _) in self._ended(batch))

    def _ended(self, batch: Batch) -> Iterator[tuple[str, tuple[str, int]]]:
        """Yield (id, (outcome, bytes of its message)) of each request that RETRY may queue."""
        key = keys.batch_key(batch.id, "failed")
        for request_id, note in self._client.hscan_iter(key, count=1000):
            yield request_id.decode(), read_note(note)

    def retry_cut(self, batch: Batch, requests: Sequence[tuple[str, str, str, bytes]]) -> int:
        """Queue new messages of answered requests, and drop their answers; return their number.

        `requests` has id, SHA-1 of the stored result (hex), queue and message of each, for at most
        one chunk of lines.
        """
        args = [part for each in requests for part in each]
        while (done := self._run("retry_cut", batch.id, batch.life, *args)) == NOT_HELD:
            self.hold(batch.id)
        if done == CANCELLING:
            raise BatchConflict(f"batch {batch.id} is being cancelled: cancel it again, then retry")
        return max(0, int(done))

    def hold(self, batch_id: str) -> None:
        """Remove the expiry of a finished batch, which a retry then opens again."""
        batch = self.batch(batch_id)
        if batch is None or not self._run("hold", batch_id, batch.life):
            return
        for chunk in self.index(batch_id):
            self._run("hold", batch_id, batch.life, *chunk.request_ids(batch_id))

    def retry_dead(self, letter_ids: Iterable[str] | None = None) -> int:
        """Queue dead letters again, by default all; return the number of those queued."""
        letters, held, count = self.dead_letters(letter_ids), set[str](), 0
        while group := list(islice(letters, CHUNK)):
            for batch_id in {letter["batch_id"] or "" for letter in group} - held - {""}:
                self.hold(batch_id)
                held.add(batch_id)
            sizes = ((letter["id"], letter["bytes"]) for letter in group)
            count += sum(int(self._run("dead_retry", *ids)) for ids in groups(sizes))
        return count

    def delete(self, batch_id: str, *, force: bool = False) -> bool:
        """Delete a batch and its results; return False if it is unfinished, unless `force`."""
        batch = self.batch(batch_id)
        if batch is None:
            return True
        if batch.is_run:
            if not (force or batch.finished):
                return False
            force = all(self.delete(window.id, force=True) for window in batch.windows)
        if not self._run("delete", batch_id, batch.life, int(force)):
            return False
        self._delete_chunks(batch_id)
        return True

    def _delete_chunks(self, batch_id: str) -> None:
        index = keys.batch_key(batch_id, "index")
        more = 1
        while more:
            raw = self._client.lindex(index, 0) or b""
            ids = IndexChunk.load(raw).request_ids(batch_id) if raw else ()
            more = self._run("delete_chunk", batch_id, raw, *ids)


def read_note(note: bytes) -> tuple[str, int]:
    """Return outcome and message bytes of a note in `failed` (contract/lua/common.lua)."""
    _, outcome, size, _ = note.split(b"\0", 3)
    return outcome.decode(), int(size)


def _reach(store: Reads, waits_s: Iterable[float]) -> None:
    """Send PING until Redis answers, at most once more after each wait."""
    for wait_s in waits_s:
        try:
            store.ping()
            break
        except StoreUnreachable:
            time.sleep(wait_s)
    else:
        store.ping()
