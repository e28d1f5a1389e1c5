"""Jobs that this process holds under a lease: renewed while they go on, and given up where that
fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from contract.errors import StoreUnavailable

log = logging.getLogger(__name__)
Job = TypeVar("Job")
#: Jobs that are renewed in one call: Redis serves nobody else meanwhile.
_AT_ONCE = 250


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

    def __init__(self, renew: Callable[[Sequence[Job]], list[bool]], lease_s: float) -> None:
        """Prepare; `renew` returns of each job False if another process has it."""
        self._renew = renew
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._held: set[Held[Job]] = set()
        self._renewing = False

    def hold(self, job: Job) -> Held[Job]:
        """Renew a job's lease from now on.

        Raises:
            RuntimeError: no thread can begin; the job is not held.
        """
        held = Held(job, self._lease_s)
        with self._lock:
            if not self._renewing:
                threading.Thread(target=self._run, name="warmq-leases", daemon=True).start()
                self._renewing = True
            self._held.add(held)
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
            self._renew_all([each for each in held if not each.lost])

    def _renew_all(self, held: Sequence[Held[Job]]) -> None:
        for start in range(0, len(held), _AT_ONCE):
            some = held[start : start + _AT_ONCE]
            asked_at = time.monotonic()
            try:
                ours = self._renew([each.job for each in some])
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
