"""What Redis' append-only file tells of gateways: who claimed work when, which states it had."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from kit.verdicts.observer import commands

from gateway.batches.api.record import ENDED

_DUE, _BATCH, _HELD = b"warmq:gateway:due:", b"warmq:gateway:batch:", b":held"
#: A claim whose reply was lost is never renewed, and the connection was reset so shortly before (a
#: Redis that is busy runs what it has read) or after it.
_REPLY_MS = 2000.0


@dataclass(frozen=True)
class Takeover:
    """Work that came to another process without its holder having given it back.

    Times are in ms of Redis' clock: the holder's last sign of life, the new claim.
    """

    kind: str
    id: str
    last_sign: float
    claimed: float
    #: Whether the holder knew of its claim.
    renewed: bool

    def seconds_after(
        self,
        kills: Sequence[float],
        outages: Sequence[tuple[float, float]],
        resets: Sequence[float],
    ) -> float | None:
        """Return how long after the first kill since the last sign of life; None without one.

        While Redis is away nobody can take anything over: then it counts from its return. Who lost
        the reply to its claim never knew of it: that counts as a kill.
        """
        found = [at for at in kills if self.last_sign <= at <= self.claimed]
        if not self.renewed:
            lost = any(abs(at - self.last_sign) <= _REPLY_MS for at in resets)
            found += [self.last_sign] if lost else []
        if not found:
            return None
        # Who claims may see that Redis is back before this campaign does.
        back = [min(until, self.claimed) for since, until in outages
                if min(found) <= since <= self.claimed]  # fmt: skip
        return (self.claimed - max([min(found), *back])) / 1000


@dataclass
class History:
    """What became of batches and of the gateways' work."""

    #: The states of each batch, in their order, each once in a row.
    states: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    takeovers: list[Takeover] = field(default_factory=list)
    claims: int = 0

    def ended_twice(self) -> dict[str, list[str]]:
        """Return batches that had not exactly one last state, with all their states."""
        return {
            batch_id: states for batch_id, states in self.states.items()
            if len([s for s in states if s in ENDED]) != 1 or states[-1] not in ENDED
        }  # fmt: skip


def read_history(redis_folder: Path, lease_s: float) -> History:
    """Return what the append-only file in a Redis' folder tells."""
    reader = _Reader(lease_s * 1000)
    for words in commands(redis_folder):
        if len(words) > 2:
            reader.take(words[0].upper(), words[1], words[2:])
    return reader.history


class _Reader:
    def __init__(self, lease_ms: float) -> None:
        self.history = History()
        self._lease_ms = lease_ms
        #: By kind and id: the scores that work had since it was claimed.
        self._held: dict[tuple[bytes, bytes], list[float]] = {}
        self._score: dict[tuple[bytes, bytes], float] = {}

    def take(self, name: bytes, key: bytes, rest: list[bytes]) -> None:
        if key.startswith(_BATCH) and name in (b"HSET", b"HMSET"):
            self._batch(key[len(_BATCH) :].decode(), rest)
        elif key.startswith(_DUE) and key.endswith(_HELD):
            kind = key[len(_DUE) : -len(_HELD)]
            if name == b"HDEL":
                for work in rest:
                    self._held.pop((kind, work), None)
            elif not rest[0].endswith(b"\0again"):
                self._claim(kind, rest[0])
        elif key.startswith(_DUE) and name == b"ZADD":
            work = (key[len(_DUE) :], rest[1])
            self._score[work] = float(rest[0])
            if work in self._held:
                self._held[work].append(float(rest[0]))

    def _batch(self, batch_id: str, rest: list[bytes]) -> None:
        found = dict(zip(rest[::2], rest[1::2], strict=True))
        status = orjson.loads(found[b"document"]).get("status", "validating")
        states = self.history.states[batch_id]
        if not states or states[-1] != status or status in ENDED:
            states.append(status)

    def _claim(self, kind: bytes, work_id: bytes) -> None:
        """Its lease stands just before the token."""
        work = (kind, work_id)
        until, before = self._score[work], self._held.get(work)
        if before is not None:
            self.history.takeovers.append(Takeover(
                kind.decode(), work_id.decode(), before[-2] - self._lease_ms,
                until - self._lease_ms, renewed=len(before) > 2,
            ))  # fmt: skip
        self._held[work] = [until]
        self.history.claims += 1
