"""Remembers which request ids were met already: exactly, in constant memory."""

import mmap
import sqlite3

from producer.core.files import WriteFailed

_ID_BYTES = 16
#: Places for request ids, 32 MiB. The kernel gives a page when it is first written to; ids are
#: spread evenly by SHA-1, so all are there after some ten thousand, and nothing grows from then on.
_PLACES = 2**21
#: Ids kept there: beyond, places run short, and the others go to a temporary database, which takes
#: ten times as long.
IN_MEMORY = 1_200_000
_EMPTY = bytes(_ID_BYTES)
_CACHE_KB = 8 * 1024


class SeenIds:
    """A set of request ids: a hash table with linear probing, for a Python set takes 100 bytes or
    more an id. SQLite deletes its file by itself, also after a kill."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._room = in_memory
        self._places = mmap.mmap(-1, _PLACES * _ID_BYTES)
        self._disk: sqlite3.Connection | None = None

    def add(self, request_id: str) -> bool:
        """Remember an id; return whether it is new.

        Raises:
            WriteFailed: there is no room for it on disk.
        """
        short = bytes.fromhex(request_id.replace("-", ""))
        places, place = self._places, int.from_bytes(short[:3], "big") % _PLACES
        at = place * _ID_BYTES
        while (found := places[at : at + _ID_BYTES]) != _EMPTY:
            if found == short:
                return False
            at = (at + _ID_BYTES) % len(places)
        if self._room:
            self._room -= 1
            places[at : at + _ID_BYTES] = short
            return True
        try:
            disk = self._disk or self._open()
            return disk.execute("INSERT OR IGNORE INTO seen VALUES (?)", (short,)).rowcount == 1
        except sqlite3.Error as error:
            raise WriteFailed(
                f"cannot keep more custom_ids in a temporary file: {error}; make room in the "
                "temporary folder, or name another in SQLITE_TMPDIR"
            ) from None

    def _open(self) -> sqlite3.Connection:
        # An empty name is SQLite's unnamed temporary file, unlinked as soon as it is made.
        self._disk = disk = sqlite3.connect("", isolation_level=None)
        disk.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
        disk.execute("PRAGMA journal_mode = OFF")
        disk.execute("CREATE TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID")
        disk.execute("BEGIN")  # one transaction: nothing of this is to survive
        return disk

    def close(self) -> None:
        """Give memory and file back."""
        self._places.close()
        if self._disk is not None:
            self._disk.close()
            self._disk = None
