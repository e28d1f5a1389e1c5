"""Which requests a walk has met already: exact, in constant memory."""

from __future__ import annotations

import sqlite3

#: Request ids kept in memory (about 28 MB); the others go to a temporary database.
IN_MEMORY = 200_000
_CACHE_KB = 8 * 1024


class SeenIds:
    """A set of request ids. SQLite deletes its file by itself, also after a kill."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._bound = in_memory
        self._memory: set[str] = set()
        self._disk: sqlite3.Connection | None = None

    def add(self, request_id: str) -> bool:
        """Remember an id; return whether it is new."""
        if request_id in self._memory:
            return False
        if len(self._memory) < self._bound:
            self._memory.add(request_id)
            return True
        disk = self._disk or self._open()
        short = bytes.fromhex(request_id.replace("-", ""))
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
        self._memory.clear()
        if self._disk is not None:
            self._disk.close()
            self._disk = None
