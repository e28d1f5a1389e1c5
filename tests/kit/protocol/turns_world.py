"""Several tenants whose requests end in every way, whose weights and caps change, who come late.

Every action is what a worker, a producer or an operator does; turns_model.py says what must be
true.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import redis
from kit.protocol.lessee import LIMITS, QUEUE, SEED, Lease, chat, writer
from kit.protocol.turn_steps import end, report
from kit.protocol.turns_seen import Charge, Seen
from kit.protocol.wire import Wire, WiredStore, WiredWorker

from contract import naming
from contract.index import IndexChunk
from contract.openai.amounts import sequences_of
from contract.openai.body import CHAT_URL
from contract.redis.tenants import Tenant

#: Slots of an engine, and so the requests of a turn.
SLOTS = 4
TTL_MS = 10**10
#: What a request of each kind asks.
BODIES = {
    "short": chat("Hello"),
    "long": chat("word " * 2_000),
    "picture": chat("data:image/png;base64," + "A" * 20_000),
    "many": chat("Hello", n=3),
}
#: Outcomes that DONE is told, and whether the message is kept.
OUTCOMES = {
    "failed": ("failed", True), "rejected": ("failed", False), "cancelled": ("cancelled", True),
    "expired": ("expired", True),
}  # fmt: skip
#: What a request costs that its author must change; the most that any costs.
REJECTION, MOST = 16, 2**20
UNKNOWN_TEXT, UNKNOWN_ANSWER, MEDIUM_BYTES = 16384, 64, 4096
NO_DEATHS_COUNT = 1000


class TurnsWorld:
    """One Redis, two workers, tenants with two batches each."""

    def __init__(self, client: redis.Redis, shas: dict[str, str]) -> None:
        client.flushall()
        self.client = client
        wire = Wire(client, shas)
        self.store = WiredStore(wire, ttl_ms=TTL_MS)
        self.workers = [WiredWorker(wire, f"w{n}", TTL_MS) for n in range(2)]
        self.held: dict[str, tuple[int, Lease]] = {}
        self._names = (f"b{n}" for n in itertools.count())
        self._batches: dict[tuple[str, int, int], str] = {}

    # -- producers ------------------------------------------------------------------------

    def submit(
        self, tenant: str, which: int, step: int, lines: int, kind: str, *, late: bool
    ) -> None:
        """Queue requests of a batch, which is made if there is none; `late` ones cannot run.

        Batch 1 of a tenant has a deadline, far ahead.
        """
        place = tenant, which, step
        batch_id = self._batches.get(place) or next(self._names)
        self._batches[place] = batch_id
        list_key = naming.turn_list(QUEUE, step, tenant, batch_id)
        fields: dict[str, str | int] = {"queue": QUEUE, "tenant": tenant, "list": list_key}
        deadline = f"+{TTL_MS}" if which else ""
        _, batch = self.store.create(batch_id, SEED, fields, deadline=deadline)
        write = writer(batch, priority=step, deadline=1.0 if late else None)
        begin = batch.number("cursor")
        entries = [(line, f"c{line}", False) for line in range(begin + 1, begin + lines + 1)]
        chunk = IndexChunk(begin + lines, f"{begin + lines:040x}", entries)
        body = BODIES[kind]
        messages = [
            write.write(rid, name, line, CHAT_URL, orjson.dumps(body), sequences_of(body))
            for rid, (line, name, _) in zip(chunk.request_ids(batch_id), entries, strict=True)
        ]
        before = (begin, batch.fields["digest"])
        self.store.enqueue(batch, list_key, before, chunk, messages, [], **LIMITS)

    def cancel(self, tenant: str, which: int, step: int, line: int) -> None:
        """Cancel a batch (line 0), which takes no more requests then, or one of its requests."""
        batch_id = self._batches.get((tenant, which, step))
        if batch_id and (batch := self.store.batch(batch_id)):
            if 0 < line <= batch.number("cursor"):
                self.store.cancel_request(batch, f"c{line}")
            elif not line:
                self.store.cancel(batch)
                del self._batches[tenant, which, step]

    def delete(self, tenant: str, which: int, step: int) -> None:
        """Delete a batch, whatever of it waits or runs."""
        if batch_id := self._batches.pop((tenant, which, step), None):
            self.store.delete(batch_id, force=True)

    def set_terms(self, tenant: str, weight: float, cap: int | None) -> None:
        """Change what a tenant gets."""
        self.store.set_tenant(Tenant(tenant, weight, cap))

    # -- workers --------------------------------------------------------------------------

    def pop(self, position: int, k: int, context: int, urgent: Sequence[str] = ()) -> list[Lease]:
        """Lease some requests for an engine of this context."""
        found = self.workers[position].pop(k, slots=SLOTS, context=context, urgent=urgent)
        self.held |= {lease.id: (position, lease) for lease in found}
        return found

    def going_on(self, position: int) -> tuple[str, int]:
        """Return the list of the turn that goes on in a worker, and what is left of it."""
        name, left = self.workers[position].turn
        return name.decode() if isinstance(name, bytes) else name, int(left)

    def end(
        self, position: int, chosen: Sequence[str], ending: str, tokens: int, seen: Seen
    ) -> list[tuple[Charge, int]]:
        """End leases of one list; return what each was charged, and what it must cost."""
        worker = self.workers[position]
        leases = [self.held.pop(lease)[1] for lease in chosen]
        costs = [(seen.leases[lease], ending) for lease in chosen]
        if ending == "completed":
            report(worker, leases, tokens, 0)
        elif ending in OUTCOMES:
            outcome, keep = OUTCOMES[ending]
            end(worker, leases, outcome, keep=keep)
        elif ending == "buried":
            for lease in leases:
                worker.bury(lease, "cannot be read")
        elif ending == "lost":
            self._lose(position, chosen)
            deaths = self._deaths(position, chosen, seen)
            costs = [(seen.leases[lease], how) for lease, how in zip(chosen, deaths, strict=True)]
        else:
            died = leases if ending == "died" else ()
            worker.release(*leases, died=died, max_deaths=NO_DEATHS_COUNT)
        return [(charge, cost_of(charge, how, tokens)) for charge, how in costs]

    def _lose(self, position: int, chosen: Sequence[str]) -> None:
        """Let leases end without a word; the other worker puts them back."""
        self.workers[position].expire_leases(*(Lease(name, 0, 0, b"") for name in chosen))
        self.workers[1 - position].sweep(max_deaths=NO_DEATHS_COUNT)

    def _deaths(self, position: int, chosen: Sequence[str], seen: Seen) -> list[str]:
        """Return how each ended: the oldest died with a worker that has none left to renew."""
        name = self.workers[position].worker
        of_it = [lease for lease in seen.leases if lease.startswith(f"{name}/")]
        if len(of_it) > len(chosen):
            return ["returned"] * len(chosen)
        oldest = sorted(chosen, key=lambda lease: int(lease.rpartition("/")[2]))[:SLOTS]
        return ["died" if lease in oldest else "returned" for lease in chosen]

    def sweep(self) -> None:
        """Give tenants whose cap was raised their turns again."""
        self.workers[0].allow_sweep()
        self.workers[0].sweep(max_deaths=NO_DEATHS_COUNT)


def cost_of(charge: Charge, ending: str, tokens: int) -> int:
    """Return what a request costs that ended so."""
    match ending:
        case "completed":
            return min(tokens, MOST) if tokens else max(1, min(charge.size // 4, MOST))
        case "rejected" | "buried":
            return REJECTION
        case "returned":
            return 0
        case "died":
            return charge.cost
        case _:
            return max(1, charge.cost)


def estimate(seen: Seen, list_key: str, message: bytes, context: int) -> int:
    """Return what a request must be charged when a worker takes it; a `context` of 0 is unknown."""
    headers: Mapping[str, Any] = orjson.loads(message)["headers"]["warmq"]
    sequences = headers.get("sequences", 1)
    most = min(context * sequences, MOST) if context else MOST
    if mean := seen.means.get(list_key) or (seen.mean and max(1, seen.mean)):
        return int(min(mean, most))
    media = re.findall(rb';base64,([^"]*"?)', message)
    size = len(message) - sum(map(len, media)) + MEDIUM_BYTES * len(media)
    text = min(max(1, size // 4), context or UNKNOWN_TEXT)
    return min(text + UNKNOWN_ANSWER * sequences, most)


def lists_held(seen: Seen, worker: str) -> dict[str, list[str]]:
    """Return the leases of a worker by the list that they are charged to."""
    found: dict[str, list[str]] = {}
    for lease, charge in seen.leases.items():
        if lease.startswith(f"{worker}/"):
            found.setdefault(charge.list, []).append(lease)
    return found
