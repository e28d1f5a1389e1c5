"""/metrics of a gateway: what a fleet holds in Redis, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kit.chart.metric_pages import documented, series_of
from kit.gateways.gateway_process import GatewayProcess
from kit.protocol.lessee import submit_batch
from kit.stacks.celery_side import client_app, send, simulated
from prometheus_client.parser import text_string_to_metric_families

from contract.naming import DEFAULT_TENANT, TASK_NAME
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually

Page = dict[tuple[str, ...], float]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as started:
        yield started


@pytest.fixture
def gateway(server: RedisServer, tmp_path: Path) -> Iterator[GatewayProcess]:
    (tmp_path / "gateway").mkdir()
    with GatewayProcess(server.url, tmp_path / "gateway") as started:
        yield started


def page(gateway: GatewayProcess) -> Page:
    """Return the samples by name and label values, in the labels' alphabetical order."""
    answer = httpx.get(f"{gateway.url}/metrics", timeout=10)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def awaited(gateway: GatewayProcess, sample: tuple[str, ...], value: float) -> Page:
    """Return the page as soon as it has this sample with this value."""
    found: Page = {}

    def there() -> bool:
        found.clear()
        found.update(page(gateway))
        return found.get(sample) == value

    eventually(there, 60, f"{sample} is {value}", 0.5)
    return found


def test_the_page_tells_what_waits_by_queue_priority_and_tenant(
    gateway: GatewayProcess, server: RedisServer
) -> None:
    with server.client() as client:
        store = BatchStore(client, ttl_ms=60_000)
        submit_batch(store, bodies=[{"prompt": "a"}] * 3, batch_id="b1", tenant="alpha")
        submit_batch(store, bodies=[{"prompt": "a"}] * 2, batch_id="b2", tenant="beta")
    with client_app(server.url) as app:
        send(app, {"prompt": "a"})
    # Labels: model, priority, queue, tenant.
    found = eventually(
        lambda: (p := page(gateway))[("warmq_waiting", "", "0", "warmq", "celery")] and p, 30,
        "what waits is on the page", 0.5,
    )  # fmt: skip
    assert isinstance(found, dict)
    assert found["warmq_waiting", "", "6", "warmq", "alpha"] == 3
    assert found["warmq_waiting", "", "6", "warmq", "beta"] == 2
    assert found["warmq_waiting", "", "9", "warmq", "celery"] == 0
    assert 0 <= found["warmq_oldest_waiting_seconds", "warmq"] < 60
    assert found["warmq_workers", "warmq", "ready"] == 0
    assert (found["warmq_batches",], found["warmq_dead_letters",]) == (2, 0)
    assert found["warmq_redis_append_only",] == 1
    assert found["warmq_redis_memory_bytes",] > 100_000
    series = documented("Series of a gateway") - {"warmq_reused_total"}  # of lines that were reused
    assert {series_of(name) for name, *_ in found} == series


def test_the_page_tells_of_workers_and_their_slots(
    gateway: GatewayProcess, server: RedisServer, tmp_path: Path
) -> None:
    with simulated(server.url, tmp_path / "w.log", simulated_slots=6):
        found = eventually(
            lambda: (p := page(gateway))[("warmq_workers", "warmq", "ready")] and p, 60,
            "a worker is on the page", 0.5,
        )  # fmt: skip
    assert isinstance(found, dict)
    assert found["warmq_fleet_slots", "warmq"] == 6
    assert found["warmq_fleet_in_flight", "warmq"] == 0


def test_a_queue_that_a_batch_was_sent_to_is_told_without_any_worker(
    gateway: GatewayProcess, server: RedisServer
) -> None:
    with server.client() as client:
        store = BatchStore(client, ttl_ms=60_000)
        submit_batch(store, batch_id="b1", queue="warmq.early")
        submit_batch(store, batch_id="b2")
        found = awaited(gateway, ("warmq_waiting", "early", "6", "warmq.early", DEFAULT_TENANT), 3)
        assert found["warmq_workers", "warmq.early", "ready"] == 0
        assert found["warmq_oldest_waiting_seconds", "warmq.early"] >= 0
        submit_batch(store, batch_id="b3", queue="warmq.late")
        awaited(gateway, ("warmq_waiting", "late", "6", "warmq.late", DEFAULT_TENANT), 3)


def test_a_queue_whose_workers_have_all_ended_is_still_told(
    gateway: GatewayProcess, server: RedisServer, tmp_path: Path
) -> None:
    with simulated(server.url, tmp_path / "w.log", served_model_name="tiny"):
        awaited(gateway, ("warmq_workers", "warmq.tiny", "ready"), 1)
        answer = httpx.post(
            f"{gateway.url}/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
    told = page(gateway)
    assert told["warmq_gateway_script_calls_total", "push"] == 1
    route = "/v1/chat/completions"
    assert told["warmq_gateway_requests_total", "200", "POST", route] == 1
    assert told["warmq_gateway_online_seconds_count", route] == 1
    assert 0 < told["warmq_gateway_script_seconds_total", "push"] < 60
    with client_app(server.url) as app:
        app.send_task(TASK_NAME, args=[{"prompt": "a"}], queue="warmq.tiny")
    found = awaited(gateway, ("warmq_waiting", "tiny", "0", "warmq.tiny", "celery"), 1)
    assert found["warmq_workers", "warmq.tiny", "ready"] == 0


def test_without_redis_the_page_says_so_and_tells_nothing_old(
    gateway: GatewayProcess, server: RedisServer
) -> None:
    eventually(lambda: page(gateway)["warmq_redis_up",] == 1, 30, "a first snapshot", 0.2)
    server.stop()
    found = eventually(
        lambda: (p := page(gateway))[("warmq_redis_up",)] == 0 and p, 60, "it has noticed", 0.5
    )
    assert isinstance(found, dict)
    assert ("warmq_dead_letters",) not in found


def test_what_waits_is_told_with_the_model_of_the_queue_s_workers(
    gateway: GatewayProcess, server: RedisServer, tmp_path: Path
) -> None:
    with simulated(server.url, tmp_path / "w.log"):
        awaited(gateway, ("warmq_workers", "warmq", "ready"), 1)
        found = page(gateway)
    assert found["warmq_waiting", "simulated", "6", "warmq", "celery"] == 0


def test_tenants_beyond_the_most_that_are_named_are_told_together(
    gateway: GatewayProcess, server: RedisServer
) -> None:
    with server.client() as client:
        store = BatchStore(client, ttl_ms=60_000)
        for n in range(60):
            submit_batch(store, bodies=[{"prompt": "a"}], batch_id=f"b{n}", tenant=f"t{n:02}")
    eventually(lambda: page(gateway).get(("warmq_batches",)) == 60, 30, "all are seen", 0.5)
    found = page(gateway)
    waiting = {key[4]: value for key, value in found.items() if key[0] == "warmq_waiting"}
    assert sum(value for key, value in found.items() if key[0] == "warmq_waiting") == 60
    assert waiting["other"] >= 10
    assert len(waiting) <= 52


def test_what_no_route_takes_is_counted_together_whatever_its_path_and_method(
    gateway: GatewayProcess,
) -> None:
    assert httpx.get(f"{gateway.url}/nothing/{'a' * 9}").status_code == 404
    assert httpx.request("PATCH", f"{gateway.url}/v1/models").status_code == 405
    assert httpx.get(f"{gateway.url}/v1/batches/none").status_code == 404
    told = page(gateway)
    assert told["warmq_gateway_requests_total", "404", "none", "none"] == 1
    assert told["warmq_gateway_requests_total", "405", "none", "none"] == 1
    assert told["warmq_gateway_requests_total", "404", "GET", "/v1/batches/{batch_id}"] == 1
