"""What has ended of a batch so far, in the order in which it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.batch import Batch
from contract.index import own_id, read_ending
from contract.redis.batches import BatchStore
from contract.results import ResultLine, own_line, result_line
from gateway.redis.batch_views import Segment

#: Endings read at once.
AT_ONCE = 100


def lines(store: BatchStore, segments: Sequence[Segment], position: int) -> Iterator[ResultLine]:
    """Yield the lines from a position on.

    Each position has one; those of followers (`once`) have as many as there are, and one that runs
    again (`producer retry`) has none until it has ended anew, at a later position.
    """
    for segment in segments:
        done = max(0, position - segment.first)
        for at in range(done, segment.count, AT_ONCE):
            count = min(AT_ONCE, segment.count - at)
            texts = store.finished_ids(segment.part.id, segment.start + at, count)
            yield from _of_texts(store, segment.part, texts)


def _of_texts(store: BatchStore, part: Batch, texts: list[str]) -> Iterator[ResultLine]:
    endings = [read_ending(text) for text in texts]
    ids = list(dict.fromkeys(request_id for request_id, _ in endings))
    found = dict(zip(ids, store.results(ids), strict=True))
    entries = store.followers(part.id, endings)
    for request_id, numbers in endings:
        raw = found[request_id]
        if not numbers:
            line = own_line(request_id, raw) if raw is not None else None
            if line is not None:
                yield line
            continue
        for _ in numbers:
            entry = next(entries)
            if entry is not None and raw is not None:
                yield result_line(own_id(part.id, entry), entry[1], entry[0], raw, request_id)
