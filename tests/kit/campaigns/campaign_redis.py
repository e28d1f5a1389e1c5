"""The campaign's faults of Redis and of the way to it; each returns as campaign_faults has it."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

from kit.protocol.lessee import client_of
from kit.stacks.stage import LEASE_S

from demo.stack import eventually

if TYPE_CHECKING:
    from kit.campaigns.campaign import Campaign

#: Scripts whose replies get lost or come late; all workers run them all the time.
SCRIPTS = ("pop", "renew", "done")
#: A reply later than that would look like a worker that has died: its leases could end.
LATEST_S = LEASE_S / 2
#: Steps of Redis's clock in seconds: as an administrator or a broken time service makes them.
STEPS_S = (-600.0, 600.0, -3.0, 3.0, -0.5, 0.5)
#: The clock is never further off than this, so that no result meets the end of its time.
FURTHEST_S = 1800.0


def drop_connections(c: Campaign) -> int:
    for kind in ("normal", "pubsub"):
        client_of(c.on.store).client_kill_filter(_type=kind, skipme=True)
    return 0


def flush_scripts(c: Campaign) -> int:
    client_of(c.on.store).script_flush()
    return 0


def pause_redis(c: Campaign) -> int:
    """Longer than the lease, at times: living workers must renew before anybody sweeps."""
    server = c.on.server.process
    assert server is not None
    until = time.monotonic() + c.random.uniform(0.2, 3.5)
    server.send_signal(signal.SIGSTOP)
    eventually(lambda: time.monotonic() > until)
    server.send_signal(signal.SIGCONT)
    return 0


def restart_redis(c: Campaign) -> int:
    c.on.server.stop()
    c.on.server.start()
    return 0


def kill_redis(c: Campaign) -> int:
    c.on.server.stop(signal.SIGKILL)
    c.on.server.start()
    return 0


def lose_replies(c: Campaign) -> int:
    """Lose the replies of one or several calls of one script; Redis has executed them."""
    mark = c.mark(c.random.choice(SCRIPTS))
    for _ in range(c.random.choice((1, 1, 2, 3))):
        c.proxy.drop_reply(mark)
        _await_call(c, c.proxy.dropped)
    return 0


def delay_replies(c: Campaign) -> int:
    """Let replies of one script come late, some so late that other calls overtake them."""
    mark = c.mark(c.random.choice(SCRIPTS))
    for _ in range(c.random.choice((1, 1, 2, 3))):
        c.proxy.delay_reply(mark, c.random.uniform(0.05, LATEST_S))
        _await_call(c, c.proxy.delayed)
    return 0


def _await_call(c: Campaign, done: threading.Event) -> None:
    """Wait until the worker behind the proxy has made the call.

    It may have to start first: the others get nothing new meanwhile, for a machine of few cores
    that they keep busy builds no engine.
    """
    worker = c.behind_proxy

    def called() -> bool:
        if worker is None or c.on.announced(worker).get("state") == "ready":
            c.feed()
        return done.wait(0.1)

    eventually(called, c.hang_s, "a call by the worker behind the proxy")


def step_clock(c: Campaign) -> int:
    """Set Redis's clock wrong, forward or back."""
    clock = c.on.clock
    assert clock is not None
    clock.step(c.random.choice([s for s in STEPS_S if abs(clock.off_s + s) <= FURTHEST_S]))
    return 0
