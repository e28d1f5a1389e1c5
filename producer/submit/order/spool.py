"""A temporary file without a name: messages, until they are wanted, or records of them."""

import os
import tempfile
from array import array
from collections.abc import Iterable

from producer.input.files import WriteFailed


class Spool:
    """Byte strings, added one after the other and read in any order. It ends with the process."""

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - close() does
        except OSError as error:
            raise self._failed(error) from None
        self._ends = array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, items: Iterable[bytes]) -> None:
        """Append some.

        Raises:
            WriteFailed: as on a full disk; names the folder and how to choose another.
        """
        end, pieces = self._ends[-1], list(items)
        left = memoryview(b"".join(pieces))
        try:
            while left:  # a disk that gets full takes a part
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._failed(error) from None
        for piece in pieces:
            end += len(piece)
            self._ends.append(end)

    def size(self, number: int) -> int:
        """Return the size of one in bytes."""
        return self._ends[number + 1] - self._ends[number]

    def read(self, number: int) -> bytes:
        """Return one."""
        start = self._ends[number]
        return os.pread(self._file.fileno(), self._ends[number + 1] - start, start)

    def close(self) -> None:
        """Give the space back."""
        self._file.close()

    @staticmethod
    def _failed(error: OSError) -> WriteFailed:
        try:
            folder = tempfile.gettempdir()
        except OSError:  # none of its candidates can be written
            folder = "a temporary folder"
        return WriteFailed(
            f"cannot keep the requests in {folder} until they are in order: {error.strerror}; make "
            "room there for about the input's size, or name another folder in TMPDIR"
        )
