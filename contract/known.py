"""Makes the digests by which known answers are found, and the filter of bodies before that.

A known answer is the stored result of a request whose answer depends on nothing but its body, the
model and the engine's configuration. The result has the digest of these three.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from contract.openai.repeatable import canonical


class Offer(NamedTuple):
    """What workers of one queue offer: the identity of their engines, and the most answers.

    `identity` is a digest (hex) of the model and of the configuration that changes answers; `most`
    is WARMQ_KNOWN_ANSWERS, the most known answers of a tenant.
    """

    identity: str
    most: int


def offer_of(workers: Sequence[Mapping[str, Any]], queue: str) -> Offer | None:
    """Return the offer of a queue's living workers; None without one, or if offers differ."""
    found = {
        (worker["identity"], worker["known_answers"])
        for worker in workers
        if worker.get("queue") == queue
        and isinstance(worker.get("identity"), str)
        and isinstance(worker.get("known_answers"), int)
    }
    identities = {identity for identity, _ in found}
    if len(identities) != 1:
        return None
    return Offer(identities.pop(), min(most for _, most in found))


def identity_of(*parts: str) -> str:
    """Return the digest (hex) of what decides answers, apart from the bodies."""
    text = "\0".join(parts).encode(errors="surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def answer_digest(identity: str, url: str, body: dict[str, Any]) -> str:
    """Return the digest (hex) of a request's answer; '' if the answer may vary.

    Raises RequestRejected for a body that is nested too deep.
    """
    text = canonical(url, body, seeded=True)
    if text is None:
        return ""
    whole = b"\0".join((identity.encode(), url.encode(), text))
    return hashlib.blake2b(whole, digest_size=16).hexdigest()


#: The hash of a message's arguments as they are written (contract/message.py), by which the filter
#: passes over bodies that are not known. Unlike the digest it changes with the order of fields, and
#: takes a twentieth of the time.
body_hash = crc32


class BodyFilter:
    """Bits by the hashes of known bodies: finds bodies that may be known, and never misses one."""

    def __init__(self, *halves: bytes) -> None:
        """Prepare; each of `halves` is '' or has a power of two of bytes, as KNOW writes them."""
        self._halves = [(bits, 8 * len(bits) - 1) for bits in halves if bits]

    def __bool__(self) -> bool:
        return bool(self._halves)

    def likely(self, hashes: Sequence[int]) -> list[int]:
        """Return the numbers (from 0) of the hashes that may be of known bodies."""
        found: list[int] = []
        for bits, mask in self._halves:
            # Redis counts a byte's bits from the highest.
            found += [
                n for n, h in enumerate(hashes)
                if bits[(h & mask) >> 3] << (h & 7) & 0x80
                and bits[((other := second(h)) & mask) >> 3] << (other & 7) & 0x80
            ]  # fmt: skip
        return sorted(set(found)) if len(self._halves) > 1 else found


def second(body_hash: int) -> int:
    """Return the hash with its halves exchanged, by which KNOW sets another bit."""
    return body_hash >> 16 | (body_hash & 0xFFFF) << 16
