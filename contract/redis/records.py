"""Memory of the gateways' objects in Redis, by tenant, counted as they are written and removed."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple, cast

from contract.redis.objects import Kind
from contract.redis.reads import PAGE, Reads

_SUMS = "warmq:gateway:records"
#: Most bytes of a tenant's records: 40,000 batches of 6 kB, or 160,000 small ones.
MOST_BYTES = 256 * 2**20
#: The part of Redis' maxmemory that they may have at most: tenants and their requests share it.
MOST_PART = 8


class Record(NamedTuple):
    """One object; `bytes` is about its memory in Redis."""

    kind: Kind
    id: str
    bytes: int


class Records(Reads):
    """Counts of objects in one Redis. Each call raises StoreUnavailable where it cannot be used."""

    def most_bytes(self) -> int:
        """Return the bytes of records that a tenant may have in this Redis."""
        limit = int(self._client.info("memory")["maxmemory"])
        return min(MOST_BYTES, limit // MOST_PART) if limit else MOST_BYTES

    def bytes_of(self, owner: str) -> int:
        """Return the bytes of an owner's records; expired ones count until they are forgotten."""
        return int(self._client.hget(_SUMS, owner) or 0)

    def owners(self) -> dict[str, int]:
        """Return the bytes of each owner's records."""
        return {name.decode(): int(size) for name, size in self._client.hgetall(_SUMS).items()}

    def of(self, owner: str) -> Iterator[Record]:
        """Yield an owner's records in no order, a page at a time."""
        return chain.from_iterable(self._pages(owner))

    def kinds_of(self, owner: str, most: int) -> Counter[str]:
        """Return how many of each kind are among the first `most` of an owner's records."""
        return Counter(record.kind for record in islice(self.of(owner), most))

    def listed(self, kind: Kind, owner: str) -> Iterator[str]:
        """Yield the ids in an owner's list, expired ones included, a page at a time."""
        key, begin, found = f"warmq:gateway:{kind}s:{owner}", 0, [b""]
        while found:
            found = self._client.zrange(key, begin, begin + PAGE - 1)
            yield from (name.decode() for name in found)
            begin += len(found)

    def forget_gone(self, owner: str) -> int:
        """Remove expired records of an owner from the counts; return how many."""
        count = 0
        for page in self._pages(owner):
            names = chain.from_iterable((record.kind, record.id) for record in page)
            count += int(self._run("objects_gone", owner, *names))
        return count

    def end(self, kind: Kind, object_id: str, at_s: int) -> bool:
        """Let an object expire at a time; return whether it exists."""
        return bool(self._client.expireat(f"warmq:gateway:{kind}:{object_id}", at_s))

    def _pages(self, owner: str) -> Iterator[list[Record]]:
        cursor = -1
        while cursor:
            cursor, found = self._client.hscan(f"{_SUMS}:{owner}", max(0, cursor), count=PAGE)
            records = [_record(name, size) for name, size in found.items()]
            # A small hash comes whole, however few were asked for.
            for begin in range(0, len(records), PAGE):
                yield records[begin : begin + PAGE]


def _record(name: bytes, size: bytes) -> Record:
    kind, _, object_id = name.decode().partition(":")
    return Record(cast("Kind", kind), object_id, int(size))
