"""Renews the leases that this process holds; a lease that is not renewed is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from contract.errors import StoreUnavailable

log = logging.getLogger(__name__)
Claimed = TypeVar("Claimed")
#: Most leases renewed in one call, during which Redis serves no other client.
_AT_ONCE = 250


class LeaseLost(Exception):
    """Another process has the claim, or may get it: stop work on it."""


class Lease(Generic[Claimed]):
    def __init__(self, claim: Claimed, lease_s: float) -> None:
        self.claim = claim
        self.lost = False
        self.until = time.monotonic() + lease_s

    def check(self) -> None:
        if self.lost or time.monotonic() > self.until:
            raise LeaseLost


class Leases(Generic[Claimed]):
    """Renews leases in a thread, which runs while any lease is held."""

    def __init__(self, renew: Callable[[Sequence[Claimed]], list[bool]], lease_s: float) -> None:
        """Take `renew`, which returns False for each claim that another process has."""
        self._renew = renew
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._held: set[Lease[Claimed]] = set()
        self._renewing = False

    def hold(self, claim: Claimed) -> Lease[Claimed]:
        """Renew a claim's lease from now on; raise RuntimeError if no thread can be started."""
        lease = Lease(claim, self._lease_s)
        with self._lock:
            if not self._renewing:
                threading.Thread(target=self._run, name="warmq-leases", daemon=True).start()
                self._renewing = True
            self._held.add(lease)
        return lease

    def drop(self, lease: Lease[Claimed]) -> None:
        with self._lock:
            self._held.discard(lease)

    def _run(self) -> None:
        while True:
            time.sleep(self._lease_s / 4)
            with self._lock:
                leases = list(self._held)
                self._renewing = bool(leases)
            if not leases:
                return
            self._renew_all([lease for lease in leases if not lease.lost])

    def _renew_all(self, leases: Sequence[Lease[Claimed]]) -> None:
        for start in range(0, len(leases), _AT_ONCE):
            some = leases[start : start + _AT_ONCE]
            asked_at = time.monotonic()
            try:
                ours = self._renew([lease.claim for lease in some])
            except StoreUnavailable as error:
                log.warning(
                    "leases are not renewed: %s", error.message, extra={"action": "no_renewal"}
                )
                return
            except Exception:
                log.exception("leases are not renewed", extra={"action": "no_renewal"})
                continue
            for lease, renewed in zip(some, ours, strict=True):
                lease.lost = not renewed
                # The lease counts from the time at which its renewal was requested.
                lease.until = asked_at + self._lease_s
