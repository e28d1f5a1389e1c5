"""Every series of workers and gateways moves in a run in which everything happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from kit.chart.metric_pages import documented
from kit.stacks.eventful import Run, eventful, everything, totals

from demo.stack import eventually

#: The simulated engine has no prefix cache, and no server; what waits for a server is in
#: tests/integration/worker/process/test_worker_reasons.py.
NO_ENGINE = {"warmq_cached_prompt_tokens_total", "warmq_engine_waits"}
#: Back at 0 when the run ends: `eventful` has waited until it was more.
PASSING = {"warmq_lease_overdue_seconds", "warmq_leases"}
#: Of workers with several models (tests/gateway/test_several_models.py).
SEVERAL = {"warmq_workers_not_loaded"}
#: Of batches that will miss their deadlines (tests/integration/contract/redis/test_deadlines.py).
LATE = {"warmq_deadline_late_batches"}
#: What runs at the end of the run: nothing does.
IDLE = {"warmq_slots_in_use", "warmq_in_flight", "warmq_oldest_in_flight_seconds",
        "warmq_fleet_in_flight"}  # fmt: skip

#: Needs a worker with WARMQ_KNOWN_ANSWERS (tests/integration/gateway/batches).
REUSED = {"warmq_reused_total"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with eventful(tmp_path_factory.mktemp("eventful")) as made:
        everything(made)
        yield made


@pytest.mark.timeout(240)
def test_every_series_of_the_workers_has_moved(run: Run) -> None:
    found = run.workers_total()
    still = {name for name in documented("Series of a worker") if not found[name] > 0}
    assert still == NO_ENGINE | (IDLE - {"warmq_fleet_in_flight"})


@pytest.mark.timeout(240)
def test_every_series_of_the_gateway_has_moved(run: Run) -> None:
    wanted = documented("Series of a gateway") - PASSING - IDLE - SEVERAL - LATE - REUSED

    def still() -> set[str]:
        found = totals(run.gateway.url)
        return {name for name in wanted if not found[name] > 0}

    with contextlib.suppress(TimeoutError):
        eventually(lambda: not still(), 60, "all have moved", 0.5)
    assert still() == set()
