"""Reads a batch from its first line to its last: index, endings, results."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import orjson

from contract.batch import Batch
from contract.errors import BatchConflict
from contract.index import IndexChunk, IndexEntry, own_id
from contract.nearest import did_you_mean
from contract.redis import keys
from contract.redis.reads import Reads

#: Results that one MGET asks for, and followers that one HMGET does.
CHUNK = 500
#: After a reply of more bytes of results the next MGET asks for half as many.
REPLY_BYTES = 16 * 2**20
#: Among so many of a batch's first custom_ids the nearest to a misspelt one is looked for.
NEAR_AMONG = 20_000


class BatchLines(Reads):
    """The lines of the batches in one Redis. Raises StoreUnavailable where it cannot be used."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        #: How many results one MGET asks for: it halves where results are large.
        self._results_at_once = CHUNK

    def index(self, batch_id: str, start: int = 0) -> Iterator[IndexChunk]:
        """Yield the batch's chunks in line order, those that exist now."""
        key = keys.batch_key(batch_id, "index")
        while True:
            raws = self._client.lrange(key, start, start + 7)
            yield from (IndexChunk.load(raw) for raw in raws)
            if len(raws) < 8:
                return
            start += 8

    def finished_ids(self, batch_id: str, start: int, count: int) -> list[str]:
        """Return request ids in the order they finished; a retried one comes again.

        In a batch that runs the same bodies once, some are texts for `contract.index.read_ending`.
        """
        raws = self._client.lrange(keys.batch_key(batch_id, "finished"), start, start + count - 1)
        return [raw.decode() for raw in raws]

    def followers(
        self, batch_id: str, of: Iterable[tuple[str, range]]
    ) -> Iterator[IndexEntry | None]:
        """Yield the entries of followers, None for one that is gone; `of` has leaders' request ids
        and the numbers of their followers."""
        key = keys.batch_key(batch_id, "identical")
        wanted = ((leader, f"{leader}\0{n}") for leader, numbers in of for n in numbers)
        while page := list(islice(wanted, CHUNK)):
            raws = self._client.hmget(key, [field for _, field in page])
            for (leader, _), raw in zip(page, raws, strict=True):
                yield (*orjson.loads(raw), leader) if raw else None

    def results(self, request_ids: Sequence[str]) -> list[bytes | None]:
        """Return the stored results, None where there is none (yet)."""
        found: list[bytes | None] = []
        while len(found) < len(request_ids):
            part = request_ids[len(found) : len(found) + self._results_at_once]
            raws: list[bytes | None] = self._client.mget([keys.result_key(i) for i in part])
            found += raws
            if sum(len(raw) for raw in raws if raw) > REPLY_BYTES:
                self._results_at_once = max(1, len(part) // 2)
        return found

    def collected(self, batch: Batch) -> None:
        """Note that all results of a finished batch are kept elsewhere: no operator is told any
        more that they are about to expire."""
        self._run("collected", batch.id, batch.life)

    def written(self, batch: Batch, marks: Sequence[str]) -> None:
        """Note what is written of a batch's results: a mark tells the content of a file."""
        self._run("collected", batch.id, batch.life, *marks)

    def find(self, batch: Batch, custom_id: str) -> tuple[IndexEntry, str]:
        """Return index entry and request id of one request; the first, if a custom_id repeats.

        Raises:
            BatchConflict: if the batch has no such request.
        """
        first_ids: list[str] = []
        for chunk in self.index(batch.id):
            for entry in chunk.entries:
                if entry[1] == custom_id:
                    return entry, own_id(batch.id, entry)
            if len(first_ids) < NEAR_AMONG:
                first_ids += [entry[1] for entry in chunk.entries]
        hint = did_you_mean(custom_id, first_ids)
        raise BatchConflict(f"batch {batch.id} has no request {custom_id!r}{hint}")

    def custom_id_of(self, batch: Batch, request_id: str) -> str:
        """Return the custom_id of a request that the batch has."""
        for chunk in self.index(batch.id):
            ids = chunk.request_ids(batch.id)
            if request_id in ids:
                return chunk.entries[ids.index(request_id)][1]
        raise BatchConflict(f"batch {batch.id} has no request {request_id}")
