"""What a worker's /metrics says, of a real worker process with the simulated engine."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from kit.chart.metric_pages import documented, series_of
from kit.stacks.celery_side import client_app, send, simulated
from prometheus_client.parser import text_string_to_metric_families

from demo.stack import Worker, eventually, free_port

BODY = {"prompt": "Hello", "max_tokens": 4}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def worker(redis_url: str, tmp_path: Path, port: int) -> Iterator[Worker]:
    settings = {"simulated_slots": 4, "simulated_latency_s": 0.01, "metrics_port": port}
    with simulated(redis_url, tmp_path / "worker.log", **settings) as started:
        yield started


def page(port: int) -> dict[tuple[str, str], float]:
    """Return the samples by name and by the label that tells them apart, '' for none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in ("queue", "model")}
            found[sample.name, ",".join(own.values())] = sample.value
    return found


def scraped(port: int) -> dict[tuple[str, str], float]:
    """Return the page as soon as the worker is ready."""

    def ready() -> dict[tuple[str, str], float] | None:
        try:
            found = page(port)
        except (urllib.error.URLError, ConnectionError):
            return None
        # The state changes first: between the two the page says so of an engine that none counted.
        started = found["warmq_engine_starts_total", ""]
        return found if found["warmq_worker_state", "ready"] and started else None

    found = eventually(ready, 30, "the worker is ready")
    assert isinstance(found, dict)
    return found


@pytest.mark.usefixtures("worker")
def test_every_outcome_is_there_before_the_first_request(port: int) -> None:
    found = scraped(port)
    outcomes = {own for name, own in found if name == "warmq_requests_total"}
    assert outcomes == {"completed", "failed", "cancelled", "expired"}
    # The page is there before the engine is ready.
    eventually(lambda: scraped(port)["warmq_slots", ""] == 4, 30, "the engine is ready")
    assert scraped(port)["warmq_engine_starts_total", ""] == 1
    assert found["warmq_request_engine_seconds_count", ""] == 0


@pytest.mark.usefixtures("worker")
def test_requests_and_what_they_took_are_counted(redis_url: str, port: int) -> None:
    scraped(port)
    app = client_app(redis_url)
    sent = [send(app, BODY | {"seed": n}) for n in range(20)]
    sent.append(send(app, {"prompt": 5}))
    for result in sent:
        eventually(result.ready, 30, "it has ended")
    app.close()
    found = page(port)
    assert found["warmq_requests_total", "completed"] == 20
    assert found["warmq_requests_total", "failed"] == 1
    assert found["warmq_requests_leased_total", ""] == 21
    assert found["warmq_request_engine_seconds_count", ""] == 21
    assert found["warmq_request_engine_seconds_bucket", "+Inf"] == 21
    assert 0 < found["warmq_request_engine_seconds_sum", ""] < 60
    assert found["warmq_completion_tokens_total", ""] > 0
    assert found["warmq_in_flight", ""] == 0
    for script in ("pop", "done"):
        assert found["warmq_script_calls_total", script] > 0
        assert found["warmq_script_seconds_total", script] > 0


def test_a_port_that_is_taken_is_told(redis_url: str, tmp_path: Path, port: int) -> None:
    log = tmp_path / "worker.log"
    with simulated(redis_url, log, metrics_port=port):
        scraped(port)
        other = simulated(redis_url, tmp_path / "other.log", metrics_port=port)
        other.start()
        assert other.process is not None
        assert other.process.wait(60) != 0
        assert (
            f"WARMQ_METRICS_PORT: cannot listen on 0.0.0.0:{port}"
            in (tmp_path / "other.log").read_text()
        )


def test_values_in_files_are_refused(
    redis_url: str, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    log = tmp_path / "worker.log"
    worker = simulated(redis_url, log, metrics_port=port)
    worker.start()
    assert worker.process is not None
    assert worker.process.wait(60) != 0
    assert "PROMETHEUS_MULTIPROC_DIR: a worker with WARMQ_METRICS_PORT serves" in log.read_text()
    with simulated(redis_url, log):  # without a page it is nobody's business
        pass


def test_all_front_ends_of_a_worker_are_counted_on_one_page(
    redis_url: str, tmp_path: Path, port: int
) -> None:
    log = tmp_path / "worker.log"
    with simulated(redis_url, log, simulated_slots=4, simulated_latency_s=0.1, look_ahead=0,
                   metrics_port=port, front_ends=2):  # fmt: skip
        eventually(lambda: scraped(port)["warmq_slots", ""] == 4, 30, "both are ready", 0.1)
        app = client_app(redis_url)
        sent = [send(app, BODY | {"seed": n}) for n in range(40)]
        for result in sent:
            eventually(result.ready, 30, "it has ended")
        app.close()
        eventually(lambda: page(port)["warmq_requests_total", "completed"] == 40, 10, "all", 0.2)
        found = page(port)
    assert found["warmq_request_engine_seconds_count", ""] == 40
    assert found["warmq_script_calls_total", "pop"] > 1
    assert found["warmq_engine_starts_total", ""] == 1


def test_the_oldest_request_in_flight_is_told(redis_url: str, tmp_path: Path, port: int) -> None:
    log = tmp_path / "worker.log"
    with simulated(redis_url, log, simulated_latency_s=60, metrics_port=port, drain_timeout_s=0):
        assert scraped(port)["warmq_oldest_in_flight_seconds", ""] == 0
        app = client_app(redis_url)
        send(app, BODY)
        app.close()
        old = eventually(lambda: page(port)["warmq_oldest_in_flight_seconds", ""], 30, "held", 0.1)
        eventually(lambda: page(port)["warmq_oldest_in_flight_seconds", ""] > old, 30, "older", 0.1)


def test_loads_of_several_models_are_counted(redis_url: str, tmp_path: Path, port: int) -> None:
    models = orjson.dumps({"bad": {"path": "simulate:fail"}, "good": {}}).decode()
    with simulated(redis_url, tmp_path / "worker.log", models=models, metrics_port=port):
        scraped(port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    found = {
        (sample.name, sample.labels["model"], sample.labels.get("outcome", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("warmq_model_")
    }
    loads, seconds = "warmq_model_loads_total", "warmq_model_load_seconds_total"
    assert found.pop((seconds, "good", "")) > 0
    assert found == {
        (loads, "bad", "loaded"): 0, (loads, "bad", "failed"): 1, (seconds, "bad", ""): 0,
        (loads, "good", "loaded"): 1, (loads, "good", "failed"): 0,
        ("warmq_model_sleep_failed", "bad", ""): 0, ("warmq_model_sleep_failed", "good", ""): 0,
    }  # fmt: skip


@pytest.mark.usefixtures("worker")
def test_the_docs_list_every_series_of_a_worker(port: int) -> None:
    shown = {name for name, _ in scraped(port) if not name.startswith("vllm:")}
    assert {series_of(name) for name in shown} == documented("Series of a worker")
