"""What a worker announces and exports of servers that its engine shares with people."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from worker.drain.announcement import shared_servers_of
from worker.drain.drain import Drain
from worker.engine import Capacity
from worker.telemetry.metrics import WorkerMetrics

SHARED = {
    "why": "nobody is slower", "in_flight": 12, "in_server": 30, "limit": 24, "workers": 2,
    "paused": False, "nobody_else": False, "ttft_ms": 30.0, "ttft_ms_target": 66.0, "itl_ms": None,
    "itl_ms_target": 16.0, "tokens_today": 1203,
}  # fmt: skip


def drain(servers: object) -> Drain:
    """Return as much of a drain as is read here."""
    capacity = Capacity(8, 0, "m", details={"servers": servers} if servers is not None else {})
    settings = SimpleNamespace(queue_to_drain="warmq")
    made = SimpleNamespace(
        supervisor=SimpleNamespace(capacity=capacity), settings=settings, served="m"
    )
    return cast(Drain, made)


def test_servers_that_are_shared_are_announced_and_no_others() -> None:
    rows: dict[str, Any] = {
        "b:1": {"limit": 12, "in_flight": 6, "shared": SHARED}, "a:1": "refused",
        "c:1": {"limit": 3},
    }  # fmt: skip
    assert shared_servers_of(drain(rows)) == [{"server": "b:1", **SHARED}]
    assert shared_servers_of(drain(None)) == []
    stopped = cast(Drain, SimpleNamespace(supervisor=SimpleNamespace(capacity=None)))
    assert shared_servers_of(stopped) == []


def series(of: Drain) -> dict[str, float]:
    metrics = WorkerMetrics.__new__(WorkerMetrics)
    metrics._drain = of
    found = {}
    for family in metrics._servers():
        for sample in family.samples:
            assert sample.labels == {"queue": "warmq", "model": "m", "server": "b:1"}
            found[sample.name] = sample.value
    return found


def test_the_series_have_what_is_known() -> None:
    found = series(drain({"b:1": {"shared": SHARED}}))
    assert found == {
        "warmq_server_requests": 12, "warmq_server_limit": 24, "warmq_server_tokens_today": 1203,
        "warmq_server_first_token_seconds": 0.03, "warmq_server_first_token_target_seconds": 0.066,
        "warmq_server_between_tokens_target_seconds": 0.016,
    }  # fmt: skip
    assert series(drain({"b:1": {"limit": 3}})) == {}


def test_what_another_worker_has_published_wrongly_is_left_out() -> None:
    wrong = SHARED | {"ttft_ms": "soon", "itl_ms_target": None, "why": 5}
    found = series(drain({"b:1": {"shared": wrong}}))
    assert found["warmq_server_limit"] == 24
    assert "warmq_server_first_token_seconds" not in found
