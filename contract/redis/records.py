"""Reads how much Redis memory the records of each tenant take.

A record is a gateway's document in Redis about a file, upload or batch (objects.py). Scripts count
its bytes when they write and remove it. `owner` is the name of the record's tenant.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple, cast

from contract.redis.objects import Kind
from contract.redis.reads import PAGE, Reads

#: The key of the hash of each tenant's bytes, and the beginning of the keys of each record's bytes.
_SUMS = "warmq:gateway:records"
#: Most bytes of a tenant's records: 40,000 batches of 6 kB, or 160,000 small ones.
MOST_BYTES = 256 * 2**20
#: The second limit: a tenant's records may take at most 1/MOST_PART of maxmemory, since other
#: tenants and the queued requests share Redis's memory.
MOST_PART = 8


class Record(NamedTuple):
    """One record; `bytes` is approximately its memory in Redis."""

    kind: Kind
    id: str
    bytes: int


class Records(Reads):
    """Reads the sizes of records. Each call raises StoreUnavailable if Redis cannot be used."""

    def most_bytes(self) -> int:
        """Return the most bytes that the records of one tenant may have in this Redis."""
        limit = int(self._client.info("memory")["maxmemory"])
        return min(MOST_BYTES, limit // MOST_PART) if limit else MOST_BYTES

    def bytes_of(self, owner: str) -> int:
        """Return the bytes of a tenant's records, expired ones too until `forget_gone`."""
        return int(self._client.hget(_SUMS, owner) or 0)

    def owners(self) -> dict[str, int]:
        """Return the bytes of records by tenant."""
        return {name.decode(): int(size) for name, size in self._client.hgetall(_SUMS).items()}

    def of(self, owner: str) -> Iterator[Record]:
        """Yield a tenant's records, not in any order, and read in pages."""
        return chain.from_iterable(self._pages(owner))

    def kinds_of(self, owner: str, most: int) -> Counter[str]:
        """Return the number of each kind among the first `most` records of a tenant."""
        return Counter(record.kind for record in islice(self.of(owner), most))

    def listed(self, kind: Kind, owner: str) -> Iterator[str]:
        """Yield the ids in a tenant's list of a kind, expired ones too, and read in pages."""
        key, begin, found = f"warmq:gateway:{kind}s:{owner}", 0, [b""]
        while found:
            found = self._client.zrange(key, begin, begin + PAGE - 1)
            yield from (name.decode() for name in found)
            begin += len(found)

    def forget_gone(self, owner: str) -> int:
        """Remove a tenant's expired records from the counts; return their number."""
        count = 0
        for page in self._pages(owner):
            names = chain.from_iterable((record.kind, record.id) for record in page)
            count += int(self._run("objects_gone", owner, *names))
        return count

    def end(self, kind: Kind, object_id: str, at_s: int) -> bool:
        """Let a record expire at a time, in seconds since 1970; return whether it exists."""
        return bool(self._client.expireat(f"warmq:gateway:{kind}:{object_id}", at_s))

    def _pages(self, owner: str) -> Iterator[list[Record]]:
        cursor = -1
        while cursor:
            cursor, found = self._client.hscan(f"{_SUMS}:{owner}", max(0, cursor), count=PAGE)
            records = [_record(name, size) for name, size in found.items()]
            # HSCAN returns a small hash as a whole, whatever its `count`.
            for begin in range(0, len(records), PAGE):
                yield records[begin : begin + PAGE]


def _record(name: bytes, size: bytes) -> Record:
    kind, _, object_id = name.decode().partition(":")
    return Record(cast("Kind", kind), object_id, int(size))
