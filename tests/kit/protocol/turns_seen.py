"""What Redis says of turns at one moment: counters, leases and what they were charged, lists."""

from __future__ import annotations

from dataclasses import dataclass, field

import redis
from kit.protocol.lessee import QUEUE
from kit.protocol.snapshot import Snapshot

from contract import naming
from contract.redis import keys

#: A priority and one of its tenants.
Place = tuple[int, str]
Counters = dict[str, float]


@dataclass(frozen=True, slots=True)
class Charge:
    """What one lease is charged for."""

    list: str
    cost: int
    size: int
    sequences: int
    weight: float


@dataclass(slots=True)
class Seen:
    """The counters by place, and what they stand for."""

    rings: dict[int, Counters] = field(default_factory=dict)
    #: Of those that wait no more; `given` is the highest counter that a newcomer was given.
    left: dict[int, Counters] = field(default_factory=dict)
    given: dict[int, float] = field(default_factory=dict)
    lists: dict[Place, Counters] = field(default_factory=dict)
    lists_given: dict[Place, float] = field(default_factory=dict)
    capped: set[Place] = field(default_factory=set)
    leases: dict[str, Charge] = field(default_factory=dict)
    length: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    mean: float = 0
    #: Mean tokens of the answers of a batch, by its list.
    means: dict[str, int] = field(default_factory=dict)
    terms: dict[str, tuple[float, float]] = field(default_factory=dict)
    noted: set[str] = field(default_factory=set)
    #: The lists with a deadline that are marked, and those that must be.
    deadlines: set[str] = field(default_factory=set)
    due: set[str] = field(default_factory=set)

    @classmethod
    def take(cls, client: redis.Redis) -> Seen:
        """Look at all of Redis."""
        snap, seen = Snapshot.take(client), cls()
        for step in naming.PRIORITY_STEPS:
            ring = naming.turns_key(QUEUE, step)
            seen.rings[step] = _counters(snap, ring)
            seen.left[step] = _counters(snap, f"{ring}:left")
            if (given := seen.left[step].pop("", None)) is not None:
                seen.given[step] = given
        seen._read_queue(snap)
        seen._read_lists(snap)
        seen._read_leases(snap)
        return seen

    def _read_queue(self, snap: Snapshot) -> None:
        key = naming.turns_key(QUEUE)
        for name, value in snap.hash(key).items():
            kind, _, what = name.partition(":")
            if kind == "in_flight":
                self.in_flight[what] = int(value)
            elif kind == "floor":
                step, _, tenant = what.partition("\x06")
                self.lists_given[int(step), tenant] = float(value)
        self.waiting = int(snap.hash(key).get("waiting", 0))
        self.mean = float(snap.hash(key).get("mean", 0))
        for member in snap.list(f"{key}:capped"):
            step, _, tenant = member.decode().partition("\x06")
            self.capped.add((int(step), tenant))
        for tenant, raw in snap.hash(keys.TENANTS).items():
            weight, _, cap = raw.decode().partition("\0")
            self.terms[tenant] = float(weight), float(cap or "inf")

    def _read_lists(self, snap: Snapshot) -> None:
        for key in snap.turns(QUEUE):
            if key.count("\x06") == 2:
                _, step, tenant = key.split("\x06")
                self.lists[int(step), tenant] = _counters(snap, key)
        self.length = {key: len(snap.list(key)) for key in snap.turn_lists(QUEUE)}
        self.deadlines = set(snap.hash(naming.deadlines_key(QUEUE)))
        waiting = {key for counters in self.lists.values() for key in counters}
        for batch_id in snap.batches():
            batch = snap.batch(batch_id)
            if "deadline" in batch and batch["list"] in waiting:
                self.due.add(batch["list"])
            tokens = sum(int(batch.get(f"{kind}_tokens", 0)) for kind in ("prompt", "completion"))
            if tokens and "deleting" not in batch:
                self.means[batch["list"]] = max(1, tokens // int(batch["completed"]))

    def _read_leases(self, snap: Snapshot) -> None:
        runs = {lease for lease, end in snap.hash(keys.LEASES).items() if float(end) >= 0}
        notes = snap.hash(keys.SEQUENCES)
        self.noted = set(notes) - runs
        for worker in snap.workers():
            for lease, raw in snap.hash(keys.worker_key(worker)).items():
                _, cost, size, _, home, *_ = raw.split(b"\0", 7)
                sequences, _, *more = notes.get(lease, b"1\0").split(b"\0")
                if lease in runs:
                    weight = float(more[0]) if more else 1.0
                    self.leases[lease] = Charge(
                        home.decode(), int(cost), int(size), int(sequences), weight
                    )

    def weight_and_cap_of(self, tenant: str) -> tuple[float, float]:
        """Return weight and cap of a tenant."""
        return self.terms.get(tenant, (1.0, float("inf")))


def place_of(list_key: str) -> Place:
    """Return the priority and the tenant of a list of waiting messages."""
    _, step, tenant, _ = list_key.split("\x06")
    return int(step[1:]), tenant


def _counters(snap: Snapshot, key: str) -> Counters:
    return {name: float(value) for name, value in snap.hash(key).items()}
