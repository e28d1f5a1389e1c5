"""Hundreds of hostile calls of all routes at a gateway: none is its fault, and nothing stays.

`make faults-gateway-full` makes 2,000 of them. WARMQ_TEST_SEED=N draws the calls that failed again,
WARMQ_TEST_RESULT names a file for the figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import psutil
import pytest
from kit.gateways import watched_answers
from kit.gateways.live_stack import Stack
from kit.hostile.hostile_calls import Drawing, make_calls
from kit.protocol.lessee import client_of
from kit.verdicts.owners import ownerless

from demo.stack import eventually
from gateway.batches.api.record import ENDED

SEED = int(os.environ.get("WARMQ_TEST_SEED") or 1)
CALLS = int(os.environ.get("WARMQ_TEST_CALLS") or 400)
#: More than the largest form, file and body of four calls at once take.
GROWN_BYTES = 600 * 2**20


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path) as made:
        yield made


def running(stack: Stack) -> dict[str, str]:
    """Return the batches of gateways that have not ended, with their status."""
    client = client_of(stack.store)
    found = {}
    for key in client.scan_iter("warmq:gateway:batch:*", count=1000):
        document = orjson.loads(client.hget(key, "document") or b"{}")
        if document.get("status") not in ENDED:
            found[key.decode()] = f"{document.get('status')} {document.get('completion_window')}"
    return found


def peak_bytes(stack: Stack) -> int:
    """Return the most memory that the gateway's processes have had, together."""
    assert stack.gateway.process is not None
    whole = psutil.Process(stack.gateway.process.pid)
    statuses = [Path(f"/proc/{p.pid}/status") for p in (whole, *whole.children(recursive=True))]
    return 1024 * sum(int(s.read_text().partition("VmHWM:")[2].split()[0]) for s in statuses)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [pytest.param(SEED, id=f"seed_{SEED}")])
def test_no_call_is_a_fault_of_the_gateway_and_nothing_stays(
    stack: Stack, seed: int, record_property: Callable[[str, object], None]
) -> None:
    before = peak_bytes(stack)
    judged = make_calls(stack.gateway.url, Drawing(seed), CALLS)
    # Pages are no part of OpenAI's API, so its schemas say nothing of them. A response that has not
    # been run yet shows its request as it came, hostile tools and input items too.
    of_us = (" /ui", " /v1/responses")
    watched_answers.faults[:] = [
        f for f in watched_answers.faults if not any(path in f for path in of_us)
    ]
    assert stack.gateway.process is not None
    assert stack.gateway.process.poll() is None
    grown = peak_bytes(stack) - before
    figures = {
        "seed": seed, "calls": CALLS, "statuses": {str(k): n for k, n in judged.statuses.items()},
        "slowest_s": round(judged.slowest_s, 1), "grown_mb": grown // 2**20,
        "broken": len(judged.broken),
    }  # fmt: skip
    record_property("figures", figures)
    if result := os.environ.get("WARMQ_TEST_RESULT"):
        Path(result).write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")
    assert grown < GROWN_BYTES
    assert judged.broken == []
    try:
        eventually(lambda: not running(stack), 60, every_s=0.5)
    except TimeoutError:
        raise AssertionError(f"these batches do not end: {running(stack)}") from None
    client = client_of(stack.store)
    try:
        eventually(lambda: not ownerless(client), 30, every_s=0.5)
    except TimeoutError:
        raise AssertionError(f"these have no owner: {ownerless(client)}") from None
    assert "Traceback" not in stack.gateway.log_path.read_text()
