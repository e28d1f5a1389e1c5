"""What has ended of a batch so far, in the order in which it ended.

Redis keeps that order (`:finished`), so a position in it means the same whenever it is given. Of a
batch with several parts (models) the second follows the first, from when the first has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from contract.batch import Batch
from contract.index import own_id, read_ending
from contract.redis.batches import BatchStore
from contract.results import ResultLine, own_line, result_line

#: Endings read at once.
AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Ended:
    """The endings of one part from position `first` of the whole, `count` of them."""

    part: Batch
    first: int
    count: int


def ended_now(store: BatchStore, parts: Sequence[Batch]) -> list[Ended]:
    """Return what has ended by now of the parts, as far as its order cannot change any more."""
    found: list[Ended] = []
    first = 0
    for part in parts:
        count = store.finished_count(part.id)
        found.append(Ended(part, first, count))
        first += count
        if not part.finished:
            break
    return found


def lines(store: BatchStore, ended: Sequence[Ended], start: int) -> Iterator[ResultLine]:
    """Yield the lines from a position on.

    Each position has one, those of followers (`once`) as many as there are, and one that runs again
    (`producer retry`) has none until it has ended anew, at a later position.
    """
    for of in ended:
        for at in range(max(0, start - of.first), of.count, AT_ONCE):
            texts = store.finished_ids(of.part.id, at, min(AT_ONCE, of.count - at))
            yield from _of_texts(store, of.part, texts)


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
