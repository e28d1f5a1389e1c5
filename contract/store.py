"""The producer's side of every Redis key: batches, results, dead letters.

Every call is safe to repeat: a reply lost on the network costs nothing. Work
that grows with the batch goes in chunks, so that no script stalls Redis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import redis

from contract import keys
from contract.batch import Batch
from contract.connect import connect, masked, translated
from contract.errors import BatchConflict, RequestFailed, StoreUnavailable
from contract.index import IndexChunk, IndexEntry
from contract.results import failure_meta, outcome_of, read_meta
from contract.scripts import source

#: Requests handled per round trip where a command walks a whole batch.
CHUNK = 500
#: Workers announce themselves every second; one silent for so long is not counted.
WORKER_SILENT_S = 15.0


@dataclass(frozen=True, slots=True)
class Enqueued:
    """ENQUEUE's and SEAL's answer: ok, gone, sealed, moved or full."""

    answer: str
    cursor: int = 0
    digest: str = ""
    text: str = ""


class BatchStore:
    """Batches in one Redis. Raises StoreUnavailable where Redis cannot be used."""

    def __init__(self, client: redis.Redis, *, ttl_ms: int) -> None:
        # redis-py types every reply as bytes or str or more; these clients never decode.
        self.redis: Any = client
        self._ttl_ms = ttl_ms
        self._scripts: dict[str, Any] = {}

    @classmethod
    def open(cls, url: str, name: str, *, ttl_ms: int) -> BatchStore:
        """Return the store behind a URL, after one look whether Redis is there.

        Raises:
            StoreUnavailable: within seconds, naming the masked URL and the remedy.
        """
        try:
            with translated():
                connect(url, name, retries=0).ping()
            return cls(connect(url, name), ttl_ms=ttl_ms)
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{masked(url)}: {error.message}") from None
        except ValueError:
            # redis-py's text would quote a part of the URL, which may be the password's.
            raise StoreUnavailable(
                f"{masked(url)}: not a Redis URL; in WARMQ_REDIS_URL, percent-encode what is "
                "special in the password"
            ) from None

    def _run(self, name: str, *args: Any) -> Any:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.redis.register_script(source(name))
        with translated():
            return script(args=args)

    # -- submit ---------------------------------------------------------------

    def create(
        self, batch_id: str, seed: str, fields: dict[str, str | int], *, deadline: str = ""
    ) -> tuple[bool, Batch]:
        """Create the batch unless it exists; return whether it is new, and its state.

        `deadline` is in ms: a moment, or `+n` after the creation.
        """
        flat = [part for pair in fields.items() for part in pair]
        while (new := self._run("create", batch_id, seed, deadline, *flat)[0]) < 0:
            self._delete_chunks(batch_id)  # an interrupted delete left results behind
        batch = self.batch(batch_id)
        if batch is None:
            raise BatchConflict(f"batch {batch_id} was deleted meanwhile")
        return bool(new), batch

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
    ) -> Enqueued:
        """Append one chunk. `before` is the (cursor, digest) it follows."""
        flat = [part for pair in rejects for part in pair]
        reply = self._run(
            "enqueue", batch.id, batch.created, list_key, *before, chunk.cursor, chunk.digest,
            chunk.dump(), high_water_requests, high_water, b"\n".join(messages), *flat,
        )  # fmt: skip
        return _enqueued(reply)

    def seal(self, batch: Batch, end: tuple[int, str], reason: str = "") -> Enqueued:
        """Say that no more lines will come; `end` is the (cursor, digest) of the last chunk."""
        return _enqueued(self._run("seal", batch.id, batch.created, *end, reason))

    # -- look -----------------------------------------------------------------

    def batch(self, batch_id: str) -> Batch | None:
        """Return the state of a batch, or None if there is none."""
        with translated():
            raw = self.redis.hgetall(keys.batch_key(batch_id))
        fields = {key.decode(): value.decode() for key, value in raw.items()}
        return Batch(batch_id, fields) if fields else None

    def batches(self) -> list[Batch]:
        """Return all batches, newest first."""
        with translated():
            ids = self.redis.zrevrange(keys.BATCHES, 0, -1)
        found = (self.batch(raw.decode()) for raw in ids)
        return [batch for batch in found if batch is not None]

    def queue_lengths(self, queue: str) -> dict[str, int]:
        """Return how many messages wait in each list of a queue, suspects included."""
        lists = [*keys.priority_lists(queue), keys.suspects_list(queue)]
        with translated():
            return {key: self.redis.llen(key) for key in lists}

    def workers(self, queue: str) -> list[dict[str, Any]]:
        """Return what the living workers of a queue say about themselves."""
        with translated():
            raw = self.redis.hgetall(keys.WORKERS)
            now_s, _ = self.redis.time()
        found = []
        for name, record in raw.items():
            at_ms, _, state = record.partition(b"\0")
            if now_s - int(at_ms) / 1000 < WORKER_SILENT_S:
                found.append({"id": name.decode()} | orjson.loads(state))
        return [worker for worker in found if worker["queue"] == queue]

    def index(self, batch_id: str, start: int = 0) -> Iterator[IndexChunk]:
        """Yield the batch's chunks in line order, those that exist now."""
        key = keys.batch_key(batch_id, "index")
        while True:
            with translated():
                raws = self.redis.lrange(key, start, start + 7)
            yield from (IndexChunk.load(raw) for raw in raws)
            if len(raws) < 8:
                return
            start += 8

    def finished_ids(self, batch_id: str, start: int, count: int) -> list[str]:
        """Return request ids in the order they finished; a retried one comes again."""
        with translated():
            raws = self.redis.lrange(keys.batch_key(batch_id, "finished"), start, start + count - 1)
        return [raw.decode() for raw in raws]

    def results(self, request_ids: Sequence[str]) -> list[bytes | None]:
        """Return the stored results, None where there is none (yet)."""
        if not request_ids:
            return []
        with translated():
            found: list[bytes | None] = self.redis.mget([keys.result_key(i) for i in request_ids])
        return found

    def find(self, batch: Batch, custom_id: str) -> tuple[IndexEntry, str]:
        """Return index entry and request id of one request; the first, if a custom_id repeats.

        Raises:
            BatchConflict: if the batch has no such request.
        """
        for chunk in self.index(batch.id):
            for position, entry in enumerate(chunk.entries):
                if entry[1] == custom_id:
                    return entry, chunk.request_ids(batch.id)[position]
        raise BatchConflict(f"batch {batch.id} has no request {custom_id!r}")

    def returns(self, request_id: str) -> int:
        """Return how often an unfinished request was handed back to its queue."""
        with translated():
            return int(self.redis.hget(keys.RETURNS, request_id) or 0)

    # -- change ---------------------------------------------------------------

    def cancel(self, batch: Batch) -> int:
        """Cancel what is not finished, queued or running; return how many requests."""
        count = max(0, int(self._run("cancel", batch.id, batch.created, 1, self._ttl_ms)))
        for chunk in self.index(batch.id):
            count += self._cancel_entries(batch, chunk.entries, chunk.request_ids(batch.id))
        return count

    def cancel_request(self, batch: Batch, custom_id: str) -> int:
        """Cancel one request; return 1, or 0 if it had already ended."""
        entry, rid = self.find(batch, custom_id)
        return self._cancel_entries(batch, [entry], [rid])

    def _cancel_entries(
        self, batch: Batch, entries: Sequence[IndexEntry], request_ids: Sequence[str]
    ) -> int:
        error = RequestFailed("cancelled by the user", code="cancelled")
        args: list[str | bytes] = []
        for (line, custom_id, _), rid in zip(entries, request_ids, strict=True):
            args += [
                rid,
                failure_meta(
                    rid, error, batch=batch.id, custom_id=custom_id, line=line, revoked=True
                ),
            ]
        return max(0, int(self._run("cancel", batch.id, batch.created, 0, self._ttl_ms, *args)))

    def retry(self, batch: Batch, outcomes: Sequence[str]) -> int:
        """Queue ended requests again whose outcome is named; return how many."""
        self._keep(batch)
        count = 0
        for chunk in self.index(batch.id):
            ids = chunk.request_ids(batch.id)
            args: list[str] = []
            for rid, raw in zip(ids, self.results(ids), strict=True):
                outcome = outcome_of(read_meta(raw)) if raw is not None else ""
                if outcome in outcomes:
                    args += [rid, outcome]
            if args:
                count += max(0, self._run("retry", batch.id, batch.created, *args))
        return count

    def _keep(self, batch: Batch) -> None:
        """Take back the expiry of a finished batch's keys: it will be unfinished again."""
        parts = [keys.batch_key(batch.id, part) for part in ("", "index", "finished", "failed")]
        with translated():
            pipe = self.redis.pipeline(transaction=False)
            for key in parts:
                pipe.persist(key)
            pipe.execute()
        for chunk in self.index(batch.id):
            with translated():
                pipe = self.redis.pipeline(transaction=False)
                for rid in chunk.request_ids(batch.id):
                    pipe.persist(keys.result_key(rid))
                pipe.execute()

    def delete(self, batch_id: str) -> bool:
        """Remove a finished batch and its results; False if it is not finished.

        Interrupted half-way it can be repeated: the index goes last.
        """
        batch = self.batch(batch_id)
        if not self._run("delete", batch_id, batch.created if batch else ""):
            return False
        self._delete_chunks(batch_id)
        return True

    def _delete_chunks(self, batch_id: str) -> None:
        """Remove what a deleted batch left, until nothing is left or there is a batch again."""
        index = keys.batch_key(batch_id, "index")
        while True:
            with translated():
                raw = self.redis.lindex(index, 0)
            if raw is None:
                return
            ids = IndexChunk.load(raw).request_ids(batch_id)
            if not self._run("delete_chunk", batch_id, raw, *ids):
                return

    # -- dead letters ---------------------------------------------------------

    def dead_letters(self) -> list[dict[str, Any]]:
        """Return all dead letters, oldest first: id, reason, at (ms), list, message."""
        with translated():
            raw = self.redis.hgetall(keys.DEAD)
        letters = []
        for letter_id, record in sorted(raw.items(), key=lambda pair: int(pair[0])):
            reason, at, list_key, message = record.split(b"\0", 3)
            letters.append({
                "id": letter_id.decode(),
                "reason": reason.decode(errors="replace"),
                "at": int(at),
                "list": list_key.decode(errors="replace"),
                "message": message,
            })  # fmt: skip
        return letters

    def _batches_of(self, letter_ids: Sequence[str]) -> set[str]:
        with translated():
            records = self.redis.hmget(keys.DEAD, letter_ids) if letter_ids else []
        return {_batch_of(record) for record in records if record is not None} - {""}

    def retry_dead(self, letter_ids: Sequence[str]) -> int:
        """Queue dead letters again; return how many could be read and were."""
        for batch_id in self._batches_of(letter_ids):
            if (batch := self.batch(batch_id)) is not None:
                self._keep(batch)
        return int(self._run("dead_retry", *letter_ids))


def _batch_of(record: bytes) -> str:
    """Return the batch id in a dead letter's record, '' if it has none."""
    try:
        headers = orjson.loads(record.split(b"\0", 3)[3])["headers"]
        return str(headers["warmq"]["batch"])
    except (ValueError, LookupError, TypeError):
        return ""


def _enqueued(reply: list[bytes]) -> Enqueued:
    answer = reply[0].decode()
    if answer == "moved" or (answer == "sealed" and len(reply) > 1):
        return Enqueued(answer, int(reply[1]), reply[2].decode())
    return Enqueued(answer, text=reply[1].decode() if len(reply) > 1 else "")
