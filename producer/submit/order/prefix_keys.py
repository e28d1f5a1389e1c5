"""Stores prefix keys (keys.py) of requests, in memory or in a temporary file."""

import os
import tempfile
from array import array
from collections.abc import Iterable

import numpy as np

from producer.input.files import WriteFailed

#: Most requests whose keys are kept in memory; with more, all keys are on disk.
IN_MEMORY = 50_000
#: Number of requests whose keys are written with one call.
_GROUP = 8192


class PrefixKeys:
    """Stores prefix keys and text lengths of a file's requests, in the file's order.

    A level is a key's place among the keys of its text: level 0 has the shortest prefixes. A column
    has the keys of one level, 8 bytes a request. Ordering reads one column at a time.
    """

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._in_memory = in_memory
        self._waiting: list[np.ndarray] = []
        self._rows_waiting = 0
        #: Number of rows, and the columns, of each group of requests in memory.
        self._groups: list[tuple[int, list[np.ndarray]]] = []
        #: Number of rows, first column's number in the spool, and columns of each group on disk.
        self._on_disk: list[tuple[int, int, int]] = []
        self._spool: Spool | None = None
        self._sizes: list[np.ndarray] = []
        self._models: list[np.ndarray] = []
        #: The numbers of models by name, in the order in which the file names them.
        self._numbers: dict[str, int] = {}
        self._rows = 0
        self.levels = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, keys: np.ndarray, sizes: np.ndarray, models: Iterable[str]) -> None:
        """Add the next requests: the result of `keys_of` for them, and their models.

        May raise WriteFailed.
        """
        numbers = (self._numbers.setdefault(name, len(self._numbers)) for name in models)
        self._models.append(np.fromiter(numbers, np.int32, len(sizes)))
        self._sizes.append(sizes)
        self._rows += len(sizes)
        self.levels = max(self.levels, keys.shape[1])
        self._waiting.append(keys)
        self._rows_waiting += len(keys)
        if self._rows_waiting >= _GROUP:
            self._put_group()

    def _put_group(self) -> None:
        width = max((table.shape[1] for table in self._waiting), default=0)
        columns = np.zeros((width, self._rows_waiting), dtype=np.uint64)
        at = 0
        for table in self._waiting:
            columns[: table.shape[1], at : at + len(table)] = table.T
            at += len(table)
        self._groups.append((at, list(columns)))
        self._waiting, self._rows_waiting = [], 0
        if self._rows > self._in_memory:
            self._spool = self._spool or Spool()
            for rows, group in self._groups:
                self._on_disk.append((rows, len(self._spool), len(group)))
                self._spool.add(column.tobytes() for column in group)
            self._groups = []

    def sizes(self) -> np.ndarray:
        """Return the texts' lengths in bytes (uint32)."""
        return np.concatenate(self._sizes) if self._sizes else np.zeros(0, dtype=np.uint32)

    def models(self) -> np.ndarray:
        """Return the numbers of the requests' models, from 0 in the file's order (int32)."""
        return np.concatenate(self._models) if self._models else np.zeros(0, dtype=np.int32)

    def column(self, level: int) -> np.ndarray:
        """Return all requests' keys of one level (uint64), 0 where a text has none."""
        if self._rows_waiting:
            self._put_group()
        keys, at = np.zeros(self._rows, dtype=np.uint64), 0
        for rows, first, width in self._on_disk:
            if level < width and self._spool is not None:
                raw = self._spool.read(first + level)
                keys[at : at + rows] = np.frombuffer(raw, dtype=np.uint64)
            at += rows
        for rows, columns in self._groups:
            if level < len(columns):
                keys[at : at + rows] = columns[level]
            at += rows
        return keys

    def close(self) -> None:
        self._waiting, self._groups, self._sizes, self._models = [], [], [], []
        if self._spool is not None:
            self._spool.close()


class Spool:
    """Stores byte strings in an unnamed temporary file, and reads them by number."""

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - close() does
        except OSError as error:
            raise self._write_failed(error) from None
        self._ends = array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, values: Iterable[bytes]) -> None:
        """Append byte strings; raise WriteFailed, for example on a full disk."""
        end, pieces = self._ends[-1], list(values)
        left = memoryview(b"".join(pieces))
        try:
            while left:  # a nearly full disk writes only a part
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._write_failed(error) from None
        for piece in pieces:
            end += len(piece)
            self._ends.append(end)

    def read(self, number: int) -> bytes:
        """Return the byte string with this number, counted from 0."""
        start = self._ends[number]
        return os.pread(self._file.fileno(), self._ends[number + 1] - start, start)

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def _write_failed(error: OSError) -> WriteFailed:
        try:
            folder = tempfile.gettempdir()
        except OSError:  # no temporary folder is writable
            folder = "a temporary folder"
        return WriteFailed(
            f"cannot keep the requests in {folder} until they are in order: {error.strerror}; free "
            "space there for about the input's size, or name another folder in TMPDIR"
        )
