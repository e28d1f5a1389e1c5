"""Jobs are renewed for as long as they are held, and given up where another process has them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from contract.errors import StoreUnavailable
from demo.stack import eventually
from gateway.redis.leases import Lease, LeaseLost, Leases

LEASE_S = 0.2


class Renewals:
    """Counts renewals by job, and answers as it is told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.others: set[str] = set()
        self.away = False
        self.fails = False

    def renew(self, jobs: Sequence[str]) -> list[bool]:
        self.asked += jobs
        time.sleep(0.001)
        if self.away:
            raise StoreUnavailable("away")
        if self.fails:
            raise RuntimeError
        return [job not in self.others for job in jobs]


def lost(held: Lease[str]) -> bool:
    try:
        held.check()
    except LeaseLost:
        return True
    return False


def test_what_is_held_is_renewed_until_it_is_dropped() -> None:
    renewals = Renewals()
    leases = Leases(renewals.renew, LEASE_S)
    first, second = leases.hold("a"), leases.hold("b")
    until = first.until
    eventually(lambda: first.until > until + LEASE_S and second.until > until, 10)
    assert not lost(first)
    leases.drop(first)
    leases.drop(first)
    count = len(renewals.asked)
    eventually(lambda: renewals.asked[count:].count("b") > 2, 10)
    assert renewals.asked[count:].count("a") <= 1


def test_what_another_process_has_is_given_up_for_good() -> None:
    renewals = Renewals()
    renewals.others = {"a"}
    held = Leases(renewals.renew, LEASE_S).hold("a")
    eventually(lambda: lost(held), 10)
    renewals.others = set()
    assert lost(held)


def test_what_is_not_renewed_in_time_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    renewals = Renewals()
    renewals.away = True
    held = Leases(renewals.renew, LEASE_S).hold("a")
    eventually(lambda: lost(held), 10)
    assert caplog.records[0].action == "no_renewal"  # type: ignore[attr-defined]
    renewals.away = False
    eventually(lambda: not lost(held), 10, "nobody else has it: it goes on")


def test_an_error_of_one_renewal_does_not_end_those_that_follow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    renewals = Renewals()
    renewals.fails = True
    held = Leases(renewals.renew, LEASE_S).hold("a")
    eventually(lambda: lost(held), 10)
    assert caplog.records[0].action == "no_renewal"  # type: ignore[attr-defined]
    renewals.fails = False
    eventually(lambda: not lost(held), 10)


def test_a_job_for_which_no_thread_begins_is_not_held_and_the_next_one_is_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    renewals = Renewals()
    leases = Leases(renewals.renew, LEASE_S)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        with pytest.raises(RuntimeError):
            leases.hold("a")
    leases.hold("b")
    eventually(lambda: "b" in renewals.asked, 10)
    assert "a" not in renewals.asked


def test_thousands_are_renewed_within_their_lease() -> None:
    leases = Leases(Renewals().renew, 5 * LEASE_S)
    every = [leases.hold(str(n)) for n in range(2000)]
    until = max(held.until for held in every)
    eventually(lambda: all(held.until > until for held in every), 10)
    assert not any(map(lost, every))


def test_its_thread_ends_with_the_last_job_and_begins_with_the_next() -> None:
    renewals = Renewals()
    leases = Leases(renewals.renew, LEASE_S)
    for job in ("a", "b"):
        held = leases.hold(job)
        eventually(lambda job=job: job in renewals.asked, 10)  # type: ignore[misc]
        leases.drop(held)
        eventually(lambda: not leases._renewing, 10, "the thread ends")
