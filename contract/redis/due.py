"""Work of the gateways that has a time: whichever lives takes it, under a lease."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from contract.redis.reads import Reads

Work = Literal["batch", "webhook", "file", "upload"]
#: Nothing of these is to be looked at later than in so long: what is was put there before Redis'
#: clock stepped back. Batches wait for a minute at most (gateway/batches/api/record.py),
#: webhooks for eight hours (gateway/webhooks/delivering.py); files and uploads have ends as far
#: away as their owners like.
_LONGEST_MS: dict[Work, int] = {"batch": 120_000, "webhook": 30_000_000}


@dataclass(frozen=True, slots=True)
class Claim:
    """Work that this gateway holds, until its lease ends."""

    work: Work
    id: str
    token: str


class Due(Reads):
    """Work in one Redis. Each call raises StoreUnavailable where it cannot be used.

    A lease that ends gives the work to another one; what the former holder writes then must be
    refused by the versions of the objects it writes (objects.py).
    """

    def add(self, work: Work, work_id: str, in_ms: int = 0) -> None:
        """Ask for work to be done, or to be looked at again, also while somebody is at it."""
        self._run("due_set", work, work_id, "", in_ms)

    def claim(self, work: Work, lease_ms: int, most: int = 1) -> list[Claim]:
        """Take work whose time has come."""
        longest_ms = _LONGEST_MS.get(work)
        longest = "" if longest_ms is None else max(longest_ms, 2 * lease_ms)
        _, *flat = self._run("due_claim", work, lease_ms, most, longest)
        return [
            Claim(work, i.decode(), t.decode()) for i, t in zip(flat[::2], flat[1::2], strict=True)
        ]

    def renew(self, claims: Sequence[Claim], lease_ms: int) -> list[bool]:
        """Hold work for longer, in one round trip; False of what another one has now."""
        calls = [(claim.work, claim.id, claim.token, lease_ms) for claim in claims]
        return [*map(bool, self._client.run_scripts("due_set", calls))]

    def release(self, claim: Claim, in_ms: int) -> bool:
        """Give work back, to be looked at again; False if another one has it now."""
        return bool(self._run("due_release", claim.work, claim.id, claim.token, in_ms))

    def finish(self, claim: Claim) -> bool:
        """Say that work is done; False if another one has it now."""
        return bool(self._run("due_set", claim.work, claim.id, claim.token, ""))
