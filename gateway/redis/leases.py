"""Jobs that this process holds under a lease: renewed while they go on, and given up where that
fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from contract.errors import StoreUnavailable

log = logging.getLogger(__name__)
Job = TypeVar("Job")


class GivenUp(Exception):
    """This process is to stop work on a job, without a word: another one has it, or will."""


class Held(Generic[Job]):
    """One job. Its lease is renewed by `Leases`, and counts from when that was asked."""

    def __init__(self, job: Job, lease_s: float) -> None:
        self.job = job
        self.lost = False
        self.until = time.monotonic() + lease_s

    def check(self) -> None:
        """Raise GivenUp if somebody else may have the job by now."""
        if self.lost or time.monotonic() > self.until:
            raise GivenUp


class Leases(Generic[Job]):
    """Renews what is held, in a thread, for as long as there is any."""

    def __init__(self, renew: Callable[[Job], bool], lease_s: float) -> None:
        """Prepare; `renew` returns False if another process has the job."""
        self._renew = renew
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._held: set[Held[Job]] = set()
        self._renewing = False

    def hold(self, job: Job) -> Held[Job]:
        """Renew a job's lease from now on."""
        held = Held(job, self._lease_s)
        with self._lock:
            self._held.add(held)
            begins, self._renewing = not self._renewing, True
        if begins:
            threading.Thread(target=self._run, name="warmq-leases", daemon=True).start()
        return held

    def drop(self, held: Held[Job]) -> None:
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
            for each in held:
                asked_at = time.monotonic()
                try:
                    each.lost = each.lost or not self._renew(each.job)
                except StoreUnavailable as error:
                    log.warning(
                        "leases are not renewed: %s", error.message, extra={"action": "no_renewal"}
                    )
                    break
                each.until = asked_at + self._lease_s
