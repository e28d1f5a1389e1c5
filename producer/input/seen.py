"""Remembers what was met already: exactly, in constant memory."""

import mmap
import sqlite3

from producer.input.files import WriteFailed

#: Bytes of a key, and of what is kept beside it: request ids and digests.
_BYTES = 16
#: Places for keys, 32 MiB. The kernel gives a page when it is first written to; keys are
#: spread evenly by SHA-1, so all are there after some ten thousand, and nothing grows from then on.
_PLACES = 2**21
#: Keys kept there: beyond, places run short, and the others go to a temporary database, which takes
#: ten times as long.
IN_MEMORY = 1_200_000
_EMPTY = bytes(_BYTES)
_CACHE_KB = 8 * 1024


class KeyTable:
    """Keys, each with a value of `beside` bytes: a hash table with linear probing, for a Python
    dictionary takes 100 bytes or more a key. SQLite deletes its file by itself, also after a kill.

    With values there are half as many places of twice the size, and `in_memory` counts for half.
    """

    def __init__(self, beside: int = 0, in_memory: int = IN_MEMORY, what: str = "keys") -> None:
        self._size = _BYTES + beside
        self._count = _PLACES * _BYTES // self._size
        self._room = in_memory * _BYTES // self._size
        self._what = what
        self._places = mmap.mmap(-1, self._count * self._size)
        self._disk: sqlite3.Connection | None = None

    def put(self, key: bytes, value: bytes = b"") -> bytes | None:
        """Keep the value of a key unless it has one; return that one, None if it had none.

        Raises:
            WriteFailed: there is no room for it on disk.
        """
        places, size = self._places, self._size
        at = int.from_bytes(key[:3], "big") % self._count * size
        while (found := places[at : at + _BYTES]) != _EMPTY:
            if found == key:
                return places[at + _BYTES : at + size]
            at = (at + size) % len(places)
        if self._room:
            self._room -= 1
            places[at : at + size] = key + value
            return None
        try:
            return self._put_on_disk(key, value)
        except sqlite3.Error as error:
            raise WriteFailed(
                f"cannot keep more {self._what} in a temporary file: {error}; make room in the "
                "temporary folder, or name another in SQLITE_TMPDIR"
            ) from None

    def _put_on_disk(self, key: bytes, value: bytes) -> bytes | None:
        disk = self._disk or self._open()
        if disk.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, value)).rowcount == 1:
            return None
        found: bytes = disk.execute("SELECT value FROM seen WHERE id = ?", (key,)).fetchone()[0]
        return found

    def _open(self) -> sqlite3.Connection:
        # An empty name is SQLite's unnamed temporary file, unlinked as soon as it is made.
        self._disk = disk = sqlite3.connect("", isolation_level=None)
        disk.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
        disk.execute("PRAGMA journal_mode = OFF")
        disk.execute("CREATE TABLE seen (id BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        disk.execute("BEGIN")  # one transaction: nothing of this is to survive
        return disk

    def close(self) -> None:
        """Give memory and file back."""
        self._places.close()
        if self._disk is not None:
            self._disk.close()
            self._disk = None


class SeenIds(KeyTable):
    """A set of request ids."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        super().__init__(0, in_memory, "custom_ids")

    def add(self, request_id: str) -> bool:
        """Remember an id; return whether it is new.

        Raises:
            WriteFailed: there is no room for it on disk.
        """
        return self.put(bytes.fromhex(request_id.replace("-", ""))) is None
