"""Reads and writes the known answers of tenants, from which later requests are answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from contract.known import BodyFilter, Offer, offer_of
from contract.redis import keys
from contract.redis.reads import Reads


class KnownAnswer(NamedTuple):
    """One entry: the digest of the answer, the hash of the body, the request with the result."""

    digest: str
    body_hash: int
    request_id: str


def known_text(answers: Iterable[KnownAnswer]) -> str:
    """Return entries as the script KNOW takes them."""
    return "\n".join(f"{digest} {number} {request_id}" for digest, number, request_id in answers)


class KnownAnswers(Reads):
    """The known answers of tenants. Each call raises StoreUnavailable if Redis cannot be used.

    A tenant's entries are in two halves: new ones and used ones go into the newer half. When that
    is full, it becomes the older half, and the entries of the older half are forgotten.
    """

    def offer(self, queue: str) -> Offer | None:
        """Return what a queue's workers offer; None if none offers, or if their models differ."""
        return offer_of(self.workers(queue), queue)

    def filter(self, tenant: str) -> BodyFilter:
        """Return the filter of the bodies whose answers a tenant may reuse."""
        pipe = self._client.pipeline(transaction=False)
        for half in keys.HALVES:
            pipe.get(f"{keys.known_key(tenant, half)}:bits")
        return BodyFilter(*(raw or b"" for raw in pipe.execute()))

    def find(self, tenant: str, digests: Sequence[str]) -> list[str]:
        """Return for each digest the id of the request with the answer, '' if none is known.

        The result may be gone; ENQUEUE checks that.
        """
        if not digests:
            return []
        pipe = self._client.pipeline(transaction=False)
        for half in keys.HALVES:
            pipe.hmget(keys.known_key(tenant, half), digests)
        newer, older = pipe.execute()
        return [(a or b or b"").decode() for a, b in zip(newer, older, strict=True)]

    def with_results(self, request_ids: Sequence[str]) -> list[str]:
        """Return the ids, '' instead of those whose results are gone."""
        pipe = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            pipe.exists(keys.result_key(request_id))
        return [name if found else "" for name, found in
                zip(request_ids, pipe.execute(), strict=True)]  # fmt: skip

    def note(self, tenant: str, most: int, ttl_ms: int, answers: Iterable[KnownAnswer]) -> None:
        """Note answers, new ones and those that were just used; entries live for `ttl_ms`."""
        self._run("know", tenant, most, ttl_ms, known_text(answers))

    def drop(self, tenant: str, digests: Sequence[str]) -> None:
        """Forget entries whose results are gone."""
        pipe = self._client.pipeline(transaction=False)
        for half in keys.HALVES:
            pipe.hdel(keys.known_key(tenant, half), *digests)
        pipe.execute()

    def forget(self, tenant: str) -> int:
        """Forget all known answers of a tenant; return their number. The results stay."""
        names = [keys.known_key(tenant, half) for half in keys.HALVES]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.hlen(name)
        pipe.unlink(*names, *(f"{name}:bits" for name in names))
        return sum(pipe.execute()[:2])
