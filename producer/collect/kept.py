"""Adds the kept columns of a batch's table to its results, by the numbers of their lines."""

from __future__ import annotations

from collections import OrderedDict

from contract.batch import Batch
from contract.redis.batches import BatchStore
from contract.results import ResultLine, line_number
from producer.input.tables.kept import read_columns

#: Most chunks in memory; in the order of completion, results of several chunks are mixed.
_CHUNKS = 16


class ResultColumns:
    """Reads the kept columns of one batch from Redis, a chunk of its lines at a time."""

    def __init__(self, store: BatchStore, batch: Batch) -> None:
        self._store, self._batch_id = store, batch.id
        self._chunks: OrderedDict[int, dict[int, bytes]] = OrderedDict()
        self._last: dict[int, bytes] = {}

    def add(self, line: ResultLine) -> ResultLine:
        """Return a result with `kept`, the kept cells of its row as JSON."""
        number = line_number(line.json)
        if number not in self._last:
            self._last = self._chunk_of(number)
        if kept := self._last.get(number):
            line.json = line.json[:-1] + b',"kept":' + kept + b"}"
        return line

    def _chunk_of(self, number: int) -> dict[int, bytes]:
        """Return the kept cells of the chunk that has this line, by line."""
        for key, chunk in self._chunks.items():
            if number in chunk:
                self._chunks.move_to_end(key)
                return chunk
        for raw in self._store.columns(self._batch_id, number):
            chunk = read_columns(raw)
            if number in chunk:
                self._chunks[number] = chunk
                if len(self._chunks) > _CHUNKS:
                    self._chunks.popitem(last=False)
                return chunk
        return {number: b""}  # the result and its columns have expired
