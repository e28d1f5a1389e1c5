"""Work that this process holds: renewed while it goes on, and given up where that fails."""

from __future__ import annotations

import logging
import threading
import time

from contract.errors import StoreUnavailable
from contract.redis.due import Claim, Due

log = logging.getLogger(__name__)


class GivenUp(Exception):
    """This process is to stop work on a batch, without a word: another one has it, or will."""


class Held:
    """One batch's work. Its lease is renewed by `Leases`, and counts from when that was asked."""

    def __init__(self, claim: Claim, lease_s: float) -> None:
        self.claim = claim
        self.lost = False
        self._lease_s = lease_s
        self.until = time.monotonic() + lease_s

    def renewed(self, asked_at: float) -> None:
        """Note that the lease was renewed."""
        self.until = asked_at + self._lease_s

    def check(self) -> None:
        """Raise GivenUp if somebody else may have the work by now."""
        if self.lost or time.monotonic() > self.until:
            raise GivenUp


class Leases:
    """Renews what is held, in a thread."""

    def __init__(self, due: Due, lease_s: float, stop: threading.Event) -> None:
        self._due = due
        self._lease_s = lease_s
        self._stop = stop
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}
        self._thread = threading.Thread(target=self._run, name="warmq-leases", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def hold(self, claim: Claim) -> Held:
        """Renew a claim from now on."""
        held = Held(claim, self._lease_s)
        with self._lock:
            self._held[claim.id] = held
        return held

    def drop(self, held: Held) -> None:
        """Renew it no more."""
        with self._lock:
            if self._held.get(held.claim.id) is held:
                del self._held[held.claim.id]

    def _run(self) -> None:
        while not self._stop.wait(self._lease_s / 4):
            with self._lock:
                held = list(self._held.values())
            for each in held:
                asked_at = time.monotonic()
                try:
                    if self._due.renew(each.claim, int(self._lease_s * 1000)):
                        each.renewed(asked_at)
                    else:
                        each.lost = True
                except StoreUnavailable as error:
                    log.warning(
                        "leases are not renewed: %s", error.message, extra={"action": "no_renewal"}
                    )
                    break
