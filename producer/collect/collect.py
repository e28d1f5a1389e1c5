"""Collects a batch's results, in input or completion order."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from itertools import islice, repeat
from typing import NamedTuple

from contract.batch import Batch
from contract.errors import StoreUnavailable
from contract.index import IndexChunk, IndexEntry, entry_request_id, leader_of, read_ending
from contract.redis.batches import BatchStore
from contract.results import ResultLine, result_line, stored_line
from producer.batch_watch import BatchWatch
from producer.input.seen import SeenIds
from producer.redis import ResultPrefetch

#: Results fetched at once: the first time, and at most where they turn out to be small.
_FIRST_FETCH, _MOST_FETCHED = 50, 250
_FETCH_BYTES = 2 * 2**20
#: Chunks of the index read before the next look at the batch: as many as the store reads at once.
_INDEX_CHUNKS = 8
#: Between two looks for new results while following, in seconds.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.02, 0.5


class _Window(NamedTuple):
    """Lines that are fetched together: their request ids, those whose results answer them (a
    follower's is its leader's; one list where none is a follower), their entries in the index."""

    request_ids: list[str]
    answering_ids: list[str]
    entries: list[IndexEntry]

    def part(self, start: int, end: int) -> "_Window":
        """Return some of the lines."""
        ids = self.request_ids[start:end]
        plain = self.answering_ids is self.request_ids
        return _Window(
            ids, ids if plain else self.answering_ids[start:end], self.entries[start:end]
        )


def mark_collected(store: BatchStore, batch: Batch) -> None:
    """Note in Redis that all results of a finished batch are kept elsewhere; or do not, where it
    takes no write now, or none of this user: to read results needs none."""
    with suppress(StoreUnavailable):
        store.collected(batch)


class Collector:
    """Reads one batch's results. With `follow` it waits for those that are not there yet.

    It gives exactly one line for each of the batch's requests, or raises BatchChanged, as when
    the batch is deleted, expires, is submitted anew or is retried meanwhile. With `partial` it
    gives what there is of an unfinished batch.
    """

    def __init__(
        self,
        store: BatchStore,
        batch: Batch,
        *,
        follow: bool,
        partial: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._id = batch.id
        self._same = BatchWatch(store, batch, "its results were read")
        self._follow = follow
        self._partial = partial and not follow
        self._sleep = sleep
        self._wait_s = _SHORTEST_WAIT_S
        self._fetch = _FIRST_FETCH
        self._given = 0
        self._whole = False

    @property
    def batch(self) -> Batch:
        """The batch as it was when it was last looked at."""
        return self._same.last

    def lines(self, order: str) -> Iterator[ResultLine]:
        """Yield the result lines; `order` is input or completion.

        Raises:
            BatchChanged: at the latest after the last line, if there is not one for each request.
        """
        self._given, self._whole = 0, False
        self._same.state()
        yield from self._in_input_order() if order == "input" else self._as_completed()
        batch = self._same.state()
        whole = batch.sealed and self._given == batch.number("total")
        if not self._partial and not whole:
            raise self._same.incomplete(self._given)
        self._whole = whole and batch.finished

    def mark_collected(self) -> None:
        """Say that the lines are kept where they are to be: nobody need be told any more that they
        expire. Does nothing unless they were all lines of a batch that has ended."""
        if self._whole:
            mark_collected(self._store, self._same.last)

    def _sized(self, raws: list[bytes | None]) -> list[bytes | None]:
        """Fetch more or fewer results at once from now on, by the size of these."""
        size = sum(len(raw) for raw in raws if raw is not None) + 1
        self._fetch = max(1, min(_MOST_FETCHED, _FETCH_BYTES * len(raws) // size))
        return raws

    def _pause(self) -> None:
        self._sleep(self._wait_s)
        self._wait_s = min(self._wait_s * 2, _LONGEST_WAIT_S)

    def _in_input_order(self) -> Iterator[ResultLine]:
        for window, raws in self._fetched(self._windows()):
            if None in raws:
                yield from self._with_gaps(window)
                continue
            self._wait_s = _SHORTEST_WAIT_S
            self._given += len(raws)
            ids, answering_ids, entries = window
            lines, custom_ids = islice(zip(*entries, strict=False), 2)  # followers' have 4 parts
            leaders = repeat("") if answering_ids is ids else map(leader_of, entries)
            yield from map(result_line, ids, custom_ids, lines, raws, leaders)

    def _as_completed(self) -> Iterator[ResultLine]:
        with closing(SeenIds()) as seen:
            for window, raws in self._fetched(self._finished_windows()):
                for request_id, raw, followers in self._with_followers(window, raws):
                    # None: being retried, it will come again; or lost, see below.
                    line = stored_line(request_id, raw) if raw is not None else None
                    if line is not None and seen.add(request_id):
                        self._given += 1
                        yield line
                    for entry in followers:
                        rid = entry_request_id(self._id, entry) if entry else ""
                        if entry and raw is not None and seen.add(rid):
                            self._given += 1
                            yield result_line(rid, entry[1], entry[0], raw, request_id)
            if self._same.state().finished or not self._partial:
                yield from self._left_out(seen)

    def _fetched(
        self, windows: Iterator[_Window | None]
    ) -> Iterator[tuple[_Window, list[bytes | None]]]:
        """Yield windows with their results; Redis looks up the next ones meanwhile."""
        with closing(ResultPrefetch(self._store)) as ahead:
            asked: _Window | None = None
            for window in windows:
                raws = self._sized(ahead.answer()) if asked else []
                if window:
                    ahead.ask(window.answering_ids)
                if asked:
                    yield asked, raws
                asked = window

    def _windows(self) -> Iterator[_Window | None]:
        """Yield what is fetched together, and None before a wait for more, and at the end."""
        batch, read = self._same.last, 0
        while True:
            sealed = batch.sealed  # before the index is read: so a sealed batch's index is whole
            chunks = list(islice(self._store.index(self._id, read), _INDEX_CHUNKS))
            batch = self._same.state()  # after it: so these chunks are this batch's
            for chunk in chunks:
                lines, start = self._lines_of(chunk), 0
                while start < len(lines.entries):
                    end = start + self._fetch
                    yield lines.part(start, end)
                    start = end
            read += len(chunks)
            if len(chunks) == _INDEX_CHUNKS:
                continue
            yield None
            if sealed or not self._follow:
                return
            self._pause()

    def _finished_windows(self) -> Iterator[_Window | None]:
        """Yield the same of what has ended, in that order and without entries: the request
        ids as the list of finished ones has them."""
        at, finished, once = 0, False, self._same.last.dedupe
        while True:
            if ids := self._store.finished_ids(self._id, at, self._fetch):
                at, finished = at + len(ids), False
                self._wait_s = _SHORTEST_WAIT_S
                asked = list(dict.fromkeys(read_ending(e)[0] for e in ids)) if once else ids
                yield _Window(ids, asked, [])
                continue
            yield None
            if finished or not self._follow:
                return
            finished = self._same.state().finished  # if so, what came before is still to be read
            if not finished:
                self._pause()

    def _lines_of(self, chunk: IndexChunk) -> _Window:
        ids = answering_ids = chunk.request_ids(self._id)
        if self._same.last.dedupe:
            pairs = zip(ids, chunk.entries, strict=True)
            answering_ids = [leader_of(entry) or request_id for request_id, entry in pairs]
        return _Window(ids, answering_ids, chunk.entries)

    def _with_followers(
        self, window: _Window, raws: list[bytes | None]
    ) -> Iterator[tuple[str, bytes | None, Iterable[IndexEntry | None]]]:
        """Return what has ended, each with its result and the followers that ended with it; they
        are to be read before the next one is."""
        ended, request_ids, _ = window
        if ended is request_ids:
            return zip(ended, raws, repeat(()))
        found = dict(zip(request_ids, raws, strict=True))
        endings = list(map(read_ending, ended))
        entries = self._store.followers(self._id, endings)
        return ((rid, found[rid], islice(entries, len(numbers))) for rid, numbers in endings)

    def _with_gaps(self, window: _Window) -> Iterator[ResultLine]:
        """Yield a window's lines where results are missing: not there yet, or lost."""
        start, answering_ids = 0, window.answering_ids
        while start < len(answering_ids):
            raws, lost = self._looked_up(answering_ids[start : start + self._fetch])
            for raw in raws:
                if raw is None and not lost:
                    if self._follow:
                        self._pause()
                        break
                    if not self._partial:
                        raise self._same.incomplete(self._given)
                else:
                    self._wait_s = _SHORTEST_WAIT_S
                    entry, request_id = window.entries[start], window.request_ids[start]
                    self._given += 1
                    yield result_line(request_id, entry[1], entry[0], raw, leader_of(entry))
                start += 1

    def _looked_up(self, request_ids: list[str]) -> tuple[list[bytes | None], bool]:
        """Return results, and whether those that are missing will never come."""
        before = self._same.state()
        raws = self._sized(self._store.results(request_ids))
        after = self._same.state()
        retried = before.number("retried") != after.number("retried")
        return raws, before.finished and after.finished and not retried

    def _left_out(self, seen: SeenIds) -> Iterator[ResultLine]:
        """Yield a line for each request that the list of finished ones did not give."""
        for chunk in self._store.index(self._id):
            lines = zip(*self._lines_of(chunk), strict=True)
            if missing := [line for line in lines if seen.add(line[0])]:
                yield from self._with_gaps(_Window(*map(list, zip(*missing, strict=True))))
