"""Stores custom_ids and digests of request bodies in hash tables of bounded memory."""

import mmap
import sqlite3

from producer.input.files import WriteFailed

#: Bytes of a key: a request id or a digest.
_KEY_BYTES = 16
#: Slots for keys, 32 MiB. Keys are evenly spread: some ten thousand keys use all memory pages.
_SLOTS = 2**21
#: Most keys in memory. Further keys go to a temporary database, which is ten times as slow.
IN_MEMORY = 1_200_000
#: Content of a free slot.
_EMPTY = bytes(_KEY_BYTES)
#: Kilobytes of SQLite's cache.
_CACHE_KB = 8 * 1024


class KeyTable:
    """A hash table of keys with values of `value_bytes` each, by linear probing.

    A dict would take 100 bytes or more for each key. `in_memory` is the number of keys kept in
    memory if keys have no values; values of 16 bytes halve it. `what` names the keys in errors.
    """

    def __init__(self, value_bytes: int, in_memory: int, what: str) -> None:
        self._slot_bytes = _KEY_BYTES + value_bytes
        self._slot_count = _SLOTS * _KEY_BYTES // self._slot_bytes
        #: Number of further keys that go to memory.
        self._free_slots = in_memory * _KEY_BYTES // self._slot_bytes
        self._what = what
        self._slots = mmap.mmap(-1, self._slot_count * self._slot_bytes)
        self._disk: sqlite3.Connection | None = None

    def put(self, key: bytes, value: bytes = b"") -> bytes | None:
        """Set the value of a new key and return None; return the value of a known key.

        Raises WriteFailed if the temporary file cannot grow.
        """
        slots, size = self._slots, self._slot_bytes
        at = int.from_bytes(key[:3], "big") % self._slot_count * size
        while (slot_key := slots[at : at + _KEY_BYTES]) != _EMPTY:
            if slot_key == key:
                return slots[at + _KEY_BYTES : at + size]
            at = (at + size) % len(slots)
        if self._free_slots:
            self._free_slots -= 1
            slots[at : at + size] = key + value
            return None
        try:
            return self._put_on_disk(key, value)
        except sqlite3.Error as error:
            raise WriteFailed(
                f"cannot keep more {self._what} in a temporary file: {error}; free space in the "
                "temporary folder, or name another folder in SQLITE_TMPDIR"
            ) from None

    def _put_on_disk(self, key: bytes, value: bytes) -> bytes | None:
        disk = self._disk or self._open()
        if disk.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, value)).rowcount == 1:
            return None
        stored: bytes = disk.execute("SELECT value FROM seen WHERE id = ?", (key,)).fetchone()[0]
        return stored

    def _open(self) -> sqlite3.Connection:
        # An empty name is SQLite's unnamed temporary file, unlinked when it is created.
        self._disk = disk = sqlite3.connect("", isolation_level=None)
        disk.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
        disk.execute("PRAGMA journal_mode = OFF")
        disk.execute("CREATE TABLE seen (id BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        disk.execute("BEGIN")  # one transaction, which is never committed
        return disk

    def close(self) -> None:
        """Free the memory, and delete the temporary database."""
        self._slots.close()
        if self._disk is not None:
            self._disk.close()
            self._disk = None


class SeenIds(KeyTable):
    """A set of request ids."""

    def __init__(self, in_memory: int | None = None) -> None:
        super().__init__(0, IN_MEMORY if in_memory is None else in_memory, "custom_ids")

    def add(self, request_id: str) -> bool:
        """Add an id; return whether it is new."""
        return self.put(bytes.fromhex(request_id.replace("-", ""))) is None
