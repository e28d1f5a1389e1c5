"""Claims that this process holds under a lease: renewed while they go on, and given up where that
fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from contract.errors import StoreUnavailable

log = logging.getLogger(__name__)
Claimed = TypeVar("Claimed")
#: Claims that are renewed in one call: Redis serves nobody else meanwhile.
_AT_ONCE = 250


class LeaseLost(Exception):
    """This process is to stop work on a claim, without a word: another one has it, or will."""


class Lease(Generic[Claimed]):
    """One claim. Its lease is renewed by `Leases`, and counts from when that was asked."""

    def __init__(self, claim: Claimed, lease_s: float) -> None:
        self.claim = claim
        self.lost = False
        self.until = time.monotonic() + lease_s

    def check(self) -> None:
        """Raise LeaseLost if somebody else may have the claim by now."""
        if self.lost or time.monotonic() > self.until:
            raise LeaseLost


class Leases(Generic[Claimed]):
    """Renews what is held, in a thread, for as long as there is any."""

    def __init__(self, renew: Callable[[Sequence[Claimed]], list[bool]], lease_s: float) -> None:
        """Prepare; `renew` returns of each claim False if another process has it."""
        self._renew = renew
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._held: set[Lease[Claimed]] = set()
        self._renewing = False

    def hold(self, claim: Claimed) -> Lease[Claimed]:
        """Renew a claim's lease from now on.

        Raises:
            RuntimeError: no thread can begin; the claim is not held.
        """
        held = Lease(claim, self._lease_s)
        with self._lock:
            if not self._renewing:
                threading.Thread(target=self._run, name="warmq-leases", daemon=True).start()
                self._renewing = True
            self._held.add(held)
        return held

    def drop(self, held: Lease[Claimed]) -> None:
        """Renew it no more."""
        with self._lock:
            self._held.discard(held)

    def _run(self) -> None:
        while True:
            time.sleep(self._lease_s / 4)
            with self._lock:
                held = list(self._held)
                self._renewing = bool(held)
            if not held:
                return
            self._renew_all([each for each in held if not each.lost])

    def _renew_all(self, held: Sequence[Lease[Claimed]]) -> None:
        for start in range(0, len(held), _AT_ONCE):
            some = held[start : start + _AT_ONCE]
            asked_at = time.monotonic()
            try:
                ours = self._renew([each.claim for each in some])
            except StoreUnavailable as error:
                log.warning(
                    "leases are not renewed: %s", error.message, extra={"action": "no_renewal"}
                )
                return
            except Exception:
                log.exception("leases are not renewed", extra={"action": "no_renewal"})
                continue
            for each, renewed in zip(some, ours, strict=True):
                each.lost = not renewed
                each.until = asked_at + self._lease_s
