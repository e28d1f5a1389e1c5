"""Reads the history of queues and workers, one entry a minute (worker/lua/ring.lua)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from contract.redis.reads import Reads

#: Minutes that the history of a queue (DAY) and of a worker (HOUR) has.
DAY, HOUR = 1440, 60


class Minute(NamedTuple):
    """The sums of one minute: requests, tokens, and slot-seconds.

    `minute` counts from 1970. `other` counts the requests with any other outcome. `busy_s`
    are the slot-seconds in use, `slots_s` all slot-seconds.
    """

    minute: int
    completed: int = 0
    other: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    busy_s: int = 0
    slots_s: int = 0

    def plus(self, more: Minute) -> Minute:
        """Return the sums of both minutes, with this one's `minute`."""
        return Minute(self.minute, *(a + b for a, b in zip(self[1:], more[1:], strict=True)))

    @property
    def fill(self) -> float | None:
        """The share of slots in use; None without slots."""
        return min(1.0, self.busy_s / self.slots_s) if self.slots_s else None


class HistoryReads(Reads):
    """Reads the history. Each call raises StoreUnavailable if Redis cannot be used."""

    def day(self, queues: Iterable[str], minutes: int = DAY) -> list[Minute]:
        """Return the sums over some queues of each of the last minutes, the oldest first."""
        now = self.now_ms() // 60_000
        fields = [str(minute % DAY) for minute in range(now - minutes + 1, now + 1)]
        sums: dict[int, Minute] = {}
        for values in self._each("hmget", [f"warmq:ring:{queue}" for queue in queues], fields):
            for minute, one in _minutes(value for value in values if value).items():
                sums[minute] = sums[minute].plus(one) if minute in sums else one
        return _last(sums, now, minutes)

    def hours(self, workers: Sequence[str]) -> dict[str, list[Minute]]:
        """Return the minutes of the last hour of each worker, the oldest first."""
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
        if len(numbers) == len(Minute._fields):  # skips values of other programs
            found[numbers[0]] = Minute(*numbers)
    return found


def _last(found: Mapping[int, Minute], now: int, minutes: int) -> list[Minute]:
    """Return the last `minutes` up to `now`, with zeros for those not found."""
    return [found.get(m, Minute(m)) for m in range(now - minutes + 1, now + 1)]
