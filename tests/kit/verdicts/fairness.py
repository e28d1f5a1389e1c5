"""Whether every tenant has its turns: an observer of each lease in Redis' append-only file.

It keeps an account of what each tenant was served: the tokens that each of its requests has cost in
the end, however that was, divided by the weight of its tenant. Who comes begins with the account
of whoever was served least, or its own if it was served more shortly before. The bound:

    While a tenant waits and may run, one that was served more gets only the rest of turns that
    are going on: of each worker at most `turn` - 1 requests that are run.

So nobody waits for longer than it takes others to be served as much as it was, and one turn of each
of them at each worker; a newcomer only for these. A turn is 32 requests, or an engine's slots. What
is handed back without having run, as where the reply of a POP was lost, is nobody's turn.

What the scripts' own counters say must be the account: each request is charged for what it has
cost, no less for one that fails or is cancelled, and no refund takes anybody below what newcomers
were given. A tenant waits while one of its lists has messages. It may run unless its cap is
reached: then a request of its own runs, with whose end it may again, or the next SWEEP sees to it
that its cap was changed.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from kit.verdicts.observer import scripts

from contract import naming
from contract.redis import keys

#: Priority step and tenant.
Place = tuple[str, str]
#: What contract/lua/turns.lua says of turns, and of what a request costs, in tokens.
_LONGEST_TURN, _MOST_COST, _REJECTION = 32, 2**20, 16
#: By how much sums of shares may differ, in tokens.
_CLOSE = 0.01
_LEASED, _WORKER = b"warmq:leased:", keys.worker_key("").encode()
_TOKENS = ("prompt_tokens", "completion_tokens")
_RESULT, _KEPT = naming.RESULT_PREFIX.encode(), b":kept:"
_SUCCESS, _FAILURE, _REVOKED = (
    b'{"status":"' + word for word in (b"SUCCESS", b"FAILURE", b"REVOKED")
)


@dataclass(slots=True)
class _Lease:
    place: Place
    request: bytes
    cost: int
    weight: float = 1.0


def unfair(redis_folder: Path, slots: int, queue: str = naming.DEFAULT_QUEUE) -> list[str]:
    """Return what was not as the bound says, for people; `slots` are those of each worker."""
    turn = min(_LONGEST_TURN, slots)
    turns = _Turns(queue, turn)
    for script in scripts(redis_folder):
        turns.take(script)
    runs = ((what, len(set(leases) - turns.handed_back)) for what, leases in turns.whole_turns)
    return turns.objections + [f"{what} {count}" for what, count in runs if count >= turn]


@dataclass(slots=True)
class _Script:
    """What one script has changed, apart from the order."""

    #: Places that had turns before it, and what each was charged, in shares.
    waited: set[Place] = field(default_factory=set)
    charged: dict[Place, float] = field(default_factory=dict)
    #: Lists that it changed, and the places whose messages without a use it removed.
    lists: set[bytes] = field(default_factory=set)
    looked_at: set[Place] = field(default_factory=set)
    leased: list[_Lease] = field(default_factory=list)
    #: With whether it is on its way back to its list.
    ended: list[tuple[_Lease, bool]] = field(default_factory=list)
    #: Request ids: of deaths, of messages kept for a retry, of results that it wrote.
    died: set[bytes] = field(default_factory=set)
    kept: set[bytes] = field(default_factory=set)
    results: dict[bytes, bytes] = field(default_factory=dict)


class _Turns:
    """Reads scripts one by one. Commands are told apart by their names and keys."""

    def __init__(self, queue: str, turn: int) -> None:
        self.objections: list[str] = []
        #: Who was served more, got a turn all the same, and its leases in it.
        self.whole_turns: list[tuple[str, list[bytes]]] = []
        self.handed_back: set[bytes] = set()
        self._turn = turn
        self._list = re.compile(rf"{queue}\x06\x16(\d)\x06([^\x06]*)\x06".encode())
        self._ring = re.compile(rf"warmq:turns:{queue}\x06(\d)(:left)?".encode())
        self._capped_key = f"{naming.turns_key(queue)}:capped".encode()
        #: What each was served, divided by its weight, and who has turns.
        self._served: dict[Place, float] = {}
        self._waits: set[Place] = set()
        self._capped: set[Place] = set()
        #: Tenants whose terms were changed since the last SWEEP.
        self._changed: set[str] = set()
        #: By step, the highest account that a newcomer was given: a refund may end there.
        self._given: dict[str, float] = {}
        self._lengths: Counter[bytes] = Counter()
        self._leases: dict[bytes, _Lease] = {}
        self._in_flight: Counter[str] = Counter()
        #: By who waits: of each that was served more, by worker, the leases it got all the same.
        self._ahead: dict[Place, dict[tuple[Place, bytes], list[bytes]]] = defaultdict(dict)
        self._cancelled: set[bytes] = set()
        self._now = _Script()

    def take(self, script: list[list[bytes]]) -> None:
        """Read what one script has changed."""
        self._now = _Script(set(self._waits))
        for words in script:
            if len(words) > 1:
                self._command(words[0].upper(), words[1], words[2:])
        self._judge_charges()
        self._judge_the_waiting()
        results = self._now.results.items()
        self._cancelled |= {request for request, raw in results if raw.startswith(_REVOKED)}

    def _command(self, name: bytes, key: bytes, rest: list[bytes]) -> None:
        if name in (b"LPUSH", b"RPUSH", b"LTRIM", b"LMOVE", b"UNLINK", b"DEL"):
            self._messages(name, key, rest)
        elif name in (b"ZADD", b"ZREM") and key == keys.LEASES.encode():
            self._lease_ends(name, rest)
        elif name in (b"ZADD", b"ZREM") and (ring := self._ring.fullmatch(key)):
            self._ring_changes(name, ring[1].decode(), rest, left=bool(ring[2]))
        elif name == b"HSET" and key.startswith(_WORKER):
            self._leased(rest)
        elif name == b"HSET" and key == keys.SEQUENCES.encode():
            self._weights(rest)
        elif name == b"HSET" and key == keys.TENANTS.encode():
            self._changed.add(rest[0].decode())
        elif name == b"HSET" and key == keys.SWEEP.encode():
            self._changed.clear()
        elif key == self._capped_key:
            places = {_place(*member.split(b"\x06")) for member in rest}
            self._capped = self._capped | places if name == b"SADD" else self._capped - places
        else:
            self._ending(name, key, rest)

    # -- messages and leases ----------------------------------------------------------

    def _messages(self, name: bytes, key: bytes, rest: list[bytes]) -> None:
        if found := self._list.match(key):
            place = _place(*found.groups())
            self._now.lists.add(key)
            if name in (b"LPUSH", b"RPUSH"):
                self._lengths[key] += len(rest)
            elif name in (b"UNLINK", b"DEL"):
                del self._lengths[key]
            else:  # LMOVE of one message, or LTRIM of one without a use
                self._lengths[key] -= 1
            if name == b"LMOVE" and rest[0].startswith(_LEASED):
                self._given_to(place, rest[0][len(_LEASED) :])
            elif name not in (b"LPUSH", b"RPUSH"):
                self._now.looked_at.add(place)
                self._ahead.pop(place, None)
        if name == b"LMOVE" and self._list.match(rest[0]):
            self._now.lists.add(rest[0])
            self._lengths[rest[0]] += 1

    def _given_to(self, place: Place, lease: bytes) -> None:
        """Hold a lease against everybody who waits at the same priority."""
        served, worker = self._served.get(place, 0.0), lease.rpartition(b"/")[0]
        for waiting in self._waits - self._now.looked_at - {place}:
            if waiting[0] != place[0]:
                continue
            ahead = self._ahead[waiting]
            if served <= self._served[waiting] + _CLOSE:
                for each in [each for each in ahead if each[0] == place]:
                    del ahead[each]
                continue
            leases = ahead.setdefault((place, worker), [])
            leases.append(lease)
            if len(leases) == self._turn:
                what = f"{waiting} waits at {self._served[waiting]:.1f}, {place} at {served:.1f}"
                self.whole_turns.append((f"{what} gets of {worker.decode()}", leases))
        self._ahead.pop(place, None)

    def _leased(self, rest: list[bytes]) -> None:
        for lease, record in zip(rest[::2], rest[1::2], strict=True):
            _, cost, _, _, home, request, *_ = record.split(b"\0")
            found = self._list.match(home)
            if found and lease not in self._leases:  # else its record is only marked anew
                new = self._leases[lease] = _Lease(_place(*found.groups()), request, int(cost))
                self._now.leased.append(new)
                self._in_flight[new.place[1]] += 1

    def _weights(self, rest: list[bytes]) -> None:
        for lease, noted in zip(rest[::2], rest[1::2], strict=True):
            if lease in self._leases and len(parts := noted.split(b"\0")) > 2:
                self._leases[lease].weight = float(parts[2])

    def _lease_ends(self, name: bytes, rest: list[bytes]) -> None:
        back = name == b"ZADD"
        if back:  # with a negative score
            scored = zip(rest[::2], rest[1::2], strict=False)
            rest = [each for score, each in scored if score.startswith(b"-")]
        for each in rest:
            if lease := self._leases.pop(each, None):
                self._now.ended.append((lease, back))
                if back and lease.request not in self._now.died:
                    self.handed_back.add(each)
                self._in_flight[lease.place[1]] -= 1

    def _ending(self, name: bytes, key: bytes, rest: list[bytes]) -> None:
        if name == b"SET" and key.startswith(_RESULT):
            self._now.results[key[len(_RESULT) :]] = rest[0]
        elif name == b"RENAME" and _KEPT in rest[0]:
            self._now.kept.add(rest[0].rpartition(_KEPT)[2])
        elif name == b"HINCRBY" and key == keys.DEATHS.encode():
            self._now.died.add(rest[0].partition(b"\0")[0])

    # -- turns ------------------------------------------------------------------------

    def _ring_changes(self, name: bytes, step: str, rest: list[bytes], *, left: bool) -> None:
        place, score = (step, rest[-1].decode()), rest[-2:-1]
        if name == b"ZREM":
            if not left:
                for each in rest:
                    self._waits.discard((step, each.decode()))
                    self._ahead.pop((step, each.decode()), None)
        elif not rest[-1]:
            self._given[step] = float(score[0])
        elif b"INCR" in rest[:-2]:
            self._served[place] = self._served.get(place, 0.0) + float(score[0])
            self._now.charged[place] = self._now.charged.get(place, 0.0) + float(score[0])
        elif b"XX" in rest[:-2]:  # a refund that would have been too much
            lowest = min(float(score[0]), self._given.get(step, -math.inf))
            self._served[place] = max(self._served[place], lowest)
        elif not left:
            self._enter(place, float(score[0]))

    def _enter(self, place: Place, score: float) -> None:
        others = [self._served[each] for each in self._waits if each[0] == place[0]]
        if others:
            least = min(others)
            own = max(least, self._served.get(place, least))
            if not least - _CLOSE <= score <= own + _CLOSE:
                self._object(f"{place} begins at {score:.1f}, not at {least:.1f} to {own:.1f}")
        self._served[place] = score
        self._waits.add(place)

    # -- the verdict on one script ----------------------------------------------------

    def _judge_charges(self) -> None:
        """Hold what a script has charged against what its requests cost; that is the account."""
        now = self._now
        bounds: dict[Place, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for lease in now.leased:
            # Messages without a use that were removed on the way may cost something, too.
            bounds[lease.place][0] += lease.cost / lease.weight
            bounds[lease.place][1] = math.inf
        for lease, back in now.ended:
            for n, cost in enumerate(self._costs(lease, back=back)):
                bounds[lease.place][n] += (cost - lease.cost) / lease.weight
        for place, (low, high) in bounds.items():
            charged = now.charged.get(place)
            if charged is None and place not in now.waited:
                continue  # it has nothing that waits, and no more than others: it is forgotten
            charged = charged or 0.0
            if not low - _CLOSE <= charged <= high + _CLOSE:
                self._object(f"{place} is charged {charged:+.2f}, not {low:+.2f} to {high:+.2f}")
                self._served[place] += min(max(charged, low), high) - charged

    def _costs(self, lease: _Lease, *, back: bool) -> tuple[float, float]:
        """Return what a lease that ended costs at least and at most."""
        raw = self._now.results.get(lease.request)
        if lease.request in self._now.died:
            exact = float(lease.cost)
        elif back:
            exact = 0.0
        elif raw is None:  # it was cancelled while it ran, or runs on under another lease
            return float(lease.request in self._cancelled), math.inf
        elif raw.startswith(_SUCCESS):
            usage = orjson.loads(raw)["result"].get("usage", {})
            exact = min(sum(usage.get(name, 0) for name in _TOKENS), _MOST_COST)
            if not exact:  # then it is charged by its size
                return 1.0, math.inf
        elif raw.startswith(_FAILURE) and lease.request not in self._now.kept:
            exact = _REJECTION
        else:
            exact = max(1, lease.cost)
        return exact, exact

    def _judge_the_waiting(self) -> None:
        """Whoever has messages has turns, or requests of its own that run."""
        for key in self._now.lists:
            found = self._list.match(key)
            place = _place(*found.groups()) if found else None
            if self._lengths[key] > 0 and place not in self._waits | self._capped:
                self._object(f"{place} has {self._lengths[key]} messages, and no turns")
        for place in self._capped:
            if not self._in_flight[place[1]] and place[1] not in self._changed:
                self._object(f"{place} waits for its cap, and nothing of it runs")

    def _object(self, what: str) -> None:
        self.objections.append(what)


def _place(step: bytes, tenant: bytes) -> Place:
    return step.decode(), tenant.decode()
