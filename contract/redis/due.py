"""Schedules work of gateways, and workers' webhooks; a claim of work is a lease on it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from contract.redis.reads import Reads

#: Gateways claim all kinds of work but `notify`, which workers claim. `webhook` is the delivery of
#: an event to a tenant's endpoint, `notify` the webhook of a batch that a producer submitted.
Work = Literal["batch", "webhook", "file", "upload", "notify", "response"]
#: Longest wait of each kind of work in ms. Work that is to wait longer counts as due: its time was
#: set before Redis's clock stepped back. Batches wait at most a minute
#: (gateway/batches/api/record.py), webhooks eight hours (gateway/webhooks/delivering.py), responses
#: an hour (gateway/online/responses/calls.py). Files and uploads have no limit.
_LONGEST_MS: dict[Work, int] = {"batch": 120_000, "webhook": 30_000_000, "response": 7_200_000}


class Claim(NamedTuple):
    """Work that this gateway has claimed; `token` identifies the claim."""

    work: Work
    id: str
    token: str


class Due(Reads):
    """Schedules and claims work. Each call raises StoreUnavailable if Redis cannot be used.

    If a gateway's lease has ended, its later writes fail, because the versions of the objects have
    changed (objects.py).
    """

    def add(self, work: Work, work_id: str, in_ms: int = 0) -> None:
        """Schedule work, also while a gateway is doing it: then it is due once more."""
        self._run("due_set", work, work_id, "", in_ms)

    def claim(self, work: Work, lease_ms: int, most: int = 1) -> list[Claim]:
        """Claim up to `most` pieces of work that are due."""
        longest_ms = _LONGEST_MS.get(work)
        longest = "" if longest_ms is None else max(longest_ms, 2 * lease_ms)
        _, *flat = self._run("due_claim", work, lease_ms, most, longest)
        return [
            Claim(work, i.decode(), t.decode()) for i, t in zip(flat[::2], flat[1::2], strict=True)
        ]

    def renew(self, claims: Sequence[Claim], lease_ms: int) -> list[bool]:
        """Extend claims in one round trip; return False for each that is no longer valid."""
        calls = [(claim.work, claim.id, claim.token, lease_ms) for claim in claims]
        return [*map(bool, self._client.run_scripts("due_set", calls))]

    def release(self, claim: Claim, in_ms: int) -> bool:
        """Give work back, due again in `in_ms`; return False if the claim is no longer valid."""
        return bool(self._run("due_release", claim.work, claim.id, claim.token, in_ms))

    def finish(self, claim: Claim) -> bool:
        """Remove work that is done; return False if the claim is no longer valid."""
        return bool(self._run("due_set", claim.work, claim.id, claim.token, ""))
