"""The last day of each queue and the last hour of each worker, by minutes (worker/lua/ring.lua)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from contract.redis.reads import Reads

#: Minutes in a queue's ring and in a worker's.
DAY, HOUR = 1440, 60


class Minute(NamedTuple):
    """Sums of one minute (its number since 1970): requests, tokens, and seconds of slots."""

    minute: int
    completed: int = 0
    other: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    busy_s: int = 0
    slots_s: int = 0

    def plus(self, more: Minute) -> Minute:
        """Return the sums of both, under this one's number."""
        return Minute(self.minute, *(a + b for a, b in zip(self[1:], more[1:], strict=True)))

    @property
    def fill(self) -> float | None:
        """The share of slots in use; None without slots."""
        return min(1.0, self.busy_s / self.slots_s) if self.slots_s else None


class HistoryReads(Reads):
    """Reads of one Redis. Each raises StoreUnavailable where it cannot be used."""

    def day(self, queues: Iterable[str], minutes: int = DAY) -> list[Minute]:
        """Return the last minutes of some queues in sum, the oldest first: one round trip."""
        now = self.now_ms() // 60_000
        fields = [str(minute % DAY) for minute in range(now - minutes + 1, now + 1)]
        sums: dict[int, Minute] = {}
        for values in self._each("hmget", [f"warmq:ring:{queue}" for queue in queues], fields):
            for minute, one in _minutes(value for value in values if value).items():
                sums[minute] = sums[minute].plus(one) if minute in sums else one
        return _last(sums, now, minutes)

    def hours(self, workers: Sequence[str]) -> dict[str, list[Minute]]:
        """Return the last hour of each worker, the oldest minute first: one round trip."""
        now = self.now_ms() // 60_000
        raws = self._each("hgetall", [f"warmq:ring-of:{worker}" for worker in workers])
        return {
            worker: _last(_minutes(raw.values()), now, HOUR)
            for worker, raw in zip(workers, raws, strict=True)
        }


def _minutes(values: Iterable[bytes]) -> dict[int, Minute]:
    found = {}
    for text in values:
        numbers = [int(number) for number in text.split() if number.isdigit()]
        if len(numbers) == len(Minute._fields):  # another program's entry is skipped
            found[numbers[0]] = Minute(*numbers)
    return found


def _last(found: Mapping[int, Minute], now: int, minutes: int) -> list[Minute]:
    """Return every minute up to `now`, unknown ones as zeros."""
    return [found.get(m, Minute(m)) for m in range(now - minutes + 1, now + 1)]
