"""Scheduled work of the gateways: any living one claims it, under a lease."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from contract.redis.reads import Reads

Work = Literal["batch", "webhook", "file", "upload"]
#: Longest wait of a kind of work: a later time was set before Redis' clock stepped back. Batches
#: wait for a minute at most (gateway/batches/api/record.py), webhooks for eight hours
#: (gateway/webhooks/delivering.py); files and uploads as long as their owners like.
_LONGEST_MS: dict[Work, int] = {"batch": 120_000, "webhook": 30_000_000}


class Claim(NamedTuple):
    """Work that this gateway holds, until its lease ends."""

    work: Work
    id: str
    token: str


class Due(Reads):
    """Scheduled work in one Redis. Each call raises StoreUnavailable where it cannot be used.

    Writes of a holder whose lease has ended are refused by the versions of objects (objects.py).
    """

    def add(self, work: Work, work_id: str, in_ms: int = 0) -> None:
        """Schedule work, or schedule it again while it is done."""
        self._run("due_set", work, work_id, "", in_ms)

    def claim(self, work: Work, lease_ms: int, most: int = 1) -> list[Claim]:
        """Take work that is due."""
        longest_ms = _LONGEST_MS.get(work)
        longest = "" if longest_ms is None else max(longest_ms, 2 * lease_ms)
        _, *flat = self._run("due_claim", work, lease_ms, most, longest)
        return [
            Claim(work, i.decode(), t.decode()) for i, t in zip(flat[::2], flat[1::2], strict=True)
        ]

    def renew(self, claims: Sequence[Claim], lease_ms: int) -> list[bool]:
        """Extend claims in one round trip; False for one that another gateway has now."""
        calls = [(claim.work, claim.id, claim.token, lease_ms) for claim in claims]
        return [*map(bool, self._client.run_scripts("due_set", calls))]

    def release(self, claim: Claim, in_ms: int) -> bool:
        """Give work back, due again in `in_ms`; False if another gateway has it now."""
        return bool(self._run("due_release", claim.work, claim.id, claim.token, in_ms))

    def finish(self, claim: Claim) -> bool:
        """Remove work that is done; False if another gateway has it now."""
        return bool(self._run("due_set", claim.work, claim.id, claim.token, ""))
