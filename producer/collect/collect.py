"""Reads a batch's results, in input or completion order.

A follower is a line that gets the result of an earlier line with the same body, its leader.
"""

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

#: Results in the first MGET, and the most in any.
_FIRST_FETCH, _MOST_FETCHED = 50, 250
#: Bytes of results that one MGET should return.
_FETCH_BYTES = 2 * 2**20
#: Chunks of the index between two checks of the batch; the store reads this many with one call.
_INDEX_CHUNKS = 8
#: Shortest and longest wait in seconds between two reads of an unfinished batch.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.02, 0.5


class _Fetch(NamedTuple):
    """Lines whose results are read with one MGET.

    In input order, `listed` has the lines' request ids. In completion order it has entries of the
    batch's list of finished requests (`read_ending`), and `entries` is empty. `answering_ids` has
    the requests whose results answer the lines: for a follower, its leader. It is the same list
    object as `listed` if no line is a follower.
    """

    listed: list[str]
    answering_ids: list[str]
    entries: list[IndexEntry]

    def lines_between(self, start: int, end: int) -> "_Fetch":
        """Return a slice of the lines."""
        ids = self.listed[start:end]
        same = self.answering_ids is self.listed
        return _Fetch(ids, ids if same else self.answering_ids[start:end], self.entries[start:end])


def mark_collected(store: BatchStore, batch: Batch) -> None:
    """Note in Redis that all results of a finished batch are stored elsewhere.

    Does nothing if Redis refuses the write or is unreachable: the results are read already.
    """
    with suppress(StoreUnavailable):
        store.note_collected(batch)


class Collector:
    """Reads one batch's results: exactly one line for each request, or raises BatchChanged.

    With `follow`, it waits for missing results. With `partial` and without `follow`, it reads the
    results so far.
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
        self._watch = BatchWatch(store, batch, "its results were read")
        self._follow = follow
        self._partial = partial and not follow
        self._sleep = sleep
        self._wait_s = _SHORTEST_WAIT_S
        self._fetch_count = _FIRST_FETCH
        self._yielded = 0
        self._complete = False

    @property
    def batch(self) -> Batch:
        """The batch as last read."""
        return self._watch.last

    def lines(self, order: str) -> Iterator[ResultLine]:
        """Yield the result lines in `input` or `completion` order.

        Raises BatchChanged if a request had no line, at the latest after the last line.
        """
        self._yielded, self._complete = 0, False
        self._watch.state()
        lines = self._in_input_order() if order == "input" else self._as_completed()
        yield from self._with_columns(lines)
        batch = self._watch.state()
        complete = batch.sealed and self._yielded == batch.number("total")
        if not self._partial and not complete:
            raise self._watch.incomplete(self._yielded)
        self._complete = complete and batch.finished

    def _with_columns(self, lines: Iterator[ResultLine]) -> Iterator[ResultLine]:
        batch = self._watch.last
        if "kept_columns" not in batch.fields:
            return lines
        from producer.collect.kept import ResultColumns  # noqa: PLC0415 - few batches need it

        return map(ResultColumns(self._store, batch).add, lines)

    def mark_collected(self) -> None:
        """Note in Redis that the lines are stored, so that no warning of their expiry follows.

        Does nothing if lines are missing, or if the batch has not finished.
        """
        if self._complete:
            mark_collected(self._store, self._watch.last)

    def _adapt_fetch_count(self, raws: list[bytes | None]) -> list[bytes | None]:
        """Adapt the number of results in the next MGET to the size of `raws`; return `raws`."""
        size = sum(len(raw) for raw in raws if raw is not None) + 1
        self._fetch_count = max(1, min(_MOST_FETCHED, _FETCH_BYTES * len(raws) // size))
        return raws

    def _pause(self) -> None:
        self._sleep(self._wait_s)
        self._wait_s = min(self._wait_s * 2, _LONGEST_WAIT_S)

    def _in_input_order(self) -> Iterator[ResultLine]:
        for fetch, raws in self._fetched(self._fetches()):
            if None in raws:
                yield from self._with_gaps(fetch)
                continue
            self._wait_s = _SHORTEST_WAIT_S
            self._yielded += len(raws)
            ids, answering_ids, entries = fetch
            # A follower's entry has a fourth value, its leader.
            lines, custom_ids = islice(zip(*entries, strict=False), 2)
            leaders = repeat("") if answering_ids is ids else map(leader_of, entries)
            yield from map(result_line, ids, custom_ids, lines, raws, leaders)

    def _as_completed(self) -> Iterator[ResultLine]:
        with closing(SeenIds()) as seen:
            for fetch, raws in self._fetched(self._finished_fetches()):
                for request_id, raw, followers in self._with_followers(fetch, raws):
                    # A request without a result is being retried, or is lost (see _unlisted).
                    line = stored_line(request_id, raw) if raw is not None else None
                    if line is not None and seen.add(request_id):
                        self._yielded += 1
                        yield line
                    for entry in followers:
                        follower_id = entry_request_id(self._id, entry) if entry else ""
                        if entry and raw is not None and seen.add(follower_id):
                            self._yielded += 1
                            yield result_line(follower_id, entry[1], entry[0], raw, request_id)
            if self._watch.state().finished or not self._partial:
                yield from self._unlisted(seen)

    def _fetched(
        self, fetches: Iterator[_Fetch | None]
    ) -> Iterator[tuple[_Fetch, list[bytes | None]]]:
        """Yield fetches with their results, while Redis reads the results of the next fetch."""
        with closing(ResultPrefetch(self._store)) as ahead:
            asked: _Fetch | None = None
            for fetch in fetches:
                raws = self._adapt_fetch_count(ahead.answer()) if asked else []
                if fetch:
                    ahead.ask(fetch.answering_ids)
                if asked:
                    yield asked, raws
                asked = fetch

    def _fetches(self) -> Iterator[_Fetch | None]:
        """Yield fetches in input order, and None before each wait and at the end."""
        batch, read = self._watch.last, 0
        while True:
            sealed = batch.sealed  # read before the index: a sealed batch's index is complete
            chunks = list(islice(self._store.index(self._id, read), _INDEX_CHUNKS))
            batch = self._watch.state()  # read after the index: the chunks are this batch's
            for chunk in chunks:
                lines, start = self._lines_of(chunk), 0
                while start < len(lines.entries):
                    end = start + self._fetch_count
                    yield lines.lines_between(start, end)
                    start = end
            read += len(chunks)
            if len(chunks) == _INDEX_CHUNKS:
                continue
            yield None
            if sealed or not self._follow:
                return
            self._pause()

    def _finished_fetches(self) -> Iterator[_Fetch | None]:
        """Yield fetches in completion order, and None before each wait and at the end."""
        at, finished, dedupe = 0, False, self._watch.last.dedupe
        while True:
            if ids := self._store.finished_ids(self._id, at, self._fetch_count):
                at, finished = at + len(ids), False
                self._wait_s = _SHORTEST_WAIT_S
                answering_ids = ids
                if dedupe:
                    answering_ids = list(dict.fromkeys(read_ending(entry)[0] for entry in ids))
                yield _Fetch(ids, answering_ids, [])
                continue
            yield None
            if finished or not self._follow:
                return
            finished = self._watch.state().finished  # then the list is read once more
            if not finished:
                self._pause()

    def _lines_of(self, chunk: IndexChunk) -> _Fetch:
        ids = answering_ids = chunk.request_ids(self._id)
        if self._watch.last.dedupe:
            pairs = zip(ids, chunk.entries, strict=True)
            answering_ids = [leader_of(entry) or request_id for request_id, entry in pairs]
        return _Fetch(ids, answering_ids, chunk.entries)

    def _with_followers(
        self, fetch: _Fetch, raws: list[bytes | None]
    ) -> Iterator[tuple[str, bytes | None, Iterable[IndexEntry | None]]]:
        """Return each request with its result and its followers' entries in the index.

        The followers must be read before the next request, because one iterator yields those of all
        requests.
        """
        ended, request_ids, _ = fetch
        if ended is request_ids:
            return zip(ended, raws, repeat(()))
        results = dict(zip(request_ids, raws, strict=True))
        endings = list(map(read_ending, ended))
        entries = self._store.followers(self._id, endings)
        return ((rid, results[rid], islice(entries, len(numbers))) for rid, numbers in endings)

    def _with_gaps(self, fetch: _Fetch) -> Iterator[ResultLine]:
        """Yield the lines of a fetch with missing results, which are awaited or lost."""
        start, answering_ids = 0, fetch.answering_ids
        while start < len(answering_ids):
            raws, lost = self._read_again(answering_ids[start : start + self._fetch_count])
            for raw in raws:
                if raw is None and not lost:
                    if self._follow:
                        self._pause()
                        break
                    if not self._partial:
                        raise self._watch.incomplete(self._yielded)
                else:
                    self._wait_s = _SHORTEST_WAIT_S
                    entry, request_id = fetch.entries[start], fetch.listed[start]
                    self._yielded += 1
                    yield result_line(request_id, entry[1], entry[0], raw, leader_of(entry))
                start += 1

    def _read_again(self, request_ids: list[str]) -> tuple[list[bytes | None], bool]:
        """Return results, and whether the missing ones are lost."""
        again = True
        while again:  # Redis was away: it may have lost results, and workers have made them since
            before = self._watch.state()
            raws = self._adapt_fetch_count(self._store.results(request_ids))
            after = self._watch.state()
            again = before.reconnects != after.reconnects
        retried = before.number("retried") != after.number("retried")
        return raws, before.finished and after.finished and not retried

    def _unlisted(self, seen: SeenIds) -> Iterator[ResultLine]:
        """Yield a line for each request that is missing in the list of finished requests."""
        for chunk in self._store.index(self._id):
            lines = zip(*self._lines_of(chunk), strict=True)
            if missing := [line for line in lines if seen.add(line[0])]:
                yield from self._with_gaps(_Fetch(*map(list, zip(*missing, strict=True))))
