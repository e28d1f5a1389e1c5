"""Which requests a walk has met already: exact, in constant memory."""

from __future__ import annotations

import sqlite3

#: Request ids kept in memory (about 25 MB); the others go to a temporary database.
IN_MEMORY = 1_200_000
_ID_BYTES = 16
#: Ids lie end to end in so many buckets, by their first bits, which SHA-1 has spread evenly. A
#: set of bytes would take 100 bytes an id, and the database takes 5 to 10 times as long.
_BUCKETS = 2**14
_CACHE_KB = 8 * 1024


class SeenIds:
    """A set of request ids. SQLite deletes its file by itself, also after a kill."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._room = in_memory
        self._buckets = [bytearray() for _ in range(_BUCKETS)]
        self._disk: sqlite3.Connection | None = None

    def add(self, request_id: str) -> bool:
        """Remember an id; return whether it is new."""
        short = bytes.fromhex(request_id.replace("-", ""))
        bucket = self._buckets[(short[0] << 8 | short[1]) % _BUCKETS]
        at = bucket.find(short)
        while at > 0 and at % _ID_BYTES:  # the end of one id and the beginning of the next
            at = bucket.find(short, at + 1)
        if at >= 0:
            return False
        if self._room:
            self._room -= 1
            bucket += short
            return True
        disk = self._disk or self._open()
        return disk.execute("INSERT OR IGNORE INTO seen VALUES (?)", (short,)).rowcount == 1

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
        self._buckets.clear()
        if self._disk is not None:
            self._disk.close()
            self._disk = None
