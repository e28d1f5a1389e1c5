"""Traces of a real worker with the simulated engine and of `producer`, at a real OTLP receiver."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from kit.protocol.lessee import QUEUE
from kit.servers.otlp_receiver import Receiver, otlp_receiver
from kit.stacks.celery_side import client_app, send, simulated

from contract.message import Delivery
from contract.redis.batches import BatchStore
from contract.traces import Span, SpanContext, Tracer, read_context, root_context
from demo.stack import ROOT, RedisServer, environment_of, eventually, free_port
from worker.telemetry.traces import _context

BODY = {"prompt": "Hello", "max_tokens": 4}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with otlp_receiver() as receiving:
        for name, value in receiving.environment.items():
            monkeypatch.setenv(name, value)
        yield receiving


def producer(url: str, *words: str, traces: float | None) -> None:
    settings = {"redis_url": url} | ({} if traces is None else {"traces": traces})
    env = environment_of(settings) | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "producer", *words], env=env, check=True, timeout=60)


def lines(path: Path, count: int) -> Path:
    body = {"model": "m"} | BODY
    path.write_bytes(
        b"\n".join(
            orjson.dumps(
                {"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": body}
            )
            for n in range(count)
        )
    )
    return path


def test_a_celery_client_that_traces_is_continued_in_the_worker(
    redis_url: str, tmp_path: Path, receiver: Receiver
) -> None:
    context = root_context(sampled=True)
    with (
        simulated(redis_url, tmp_path / "worker.log", traces=0),
        client_app(redis_url) as app,
    ):
        # As opentelemetry-instrumentation-celery writes them.
        send(app, BODY, headers=context.headers()).get(timeout=30)
        (span,) = receiver.wait_for("process ")
    assert (span.trace_id, span.parent_id) == (
        f"{context.trace_id:032x}", f"{context.span_id:016x}"
    )  # fmt: skip
    assert span.name == f"process {QUEUE}"
    assert span.attributes["gen_ai.operation.name"] == "text_completion"
    assert not span.links


def test_the_stays_of_two_models_share_one_tracer_provider(
    redis_url: str, tmp_path: Path, receiver: Receiver
) -> None:
    log, file = tmp_path / "worker.log", tmp_path / "in.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    with simulated(redis_url, log, traces=1, models='{"a": {}, "b": {}}'):
        for model in ("a", "b", "a"):
            before = len(receiver.named(f"process warmq.{model}"))
            producer(redis_url, "submit", str(file), "--model", model, "--wait", traces=None)
            receiver.wait_for(f"process warmq.{model}", before + 2)
    assert log.read_text().count("swapping from model") >= 1
    assert "TracerProvider" not in log.read_text()


#: A Celery client with OpenTelemetry's own instrumentation: it prints the span it was called in.
INSTRUMENTED = """
import sys
from celery import Celery
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider

trace.set_tracer_provider(TracerProvider())
CeleryInstrumentor().instrument()
app = Celery(broker=sys.argv[1], backend=sys.argv[1])
with trace.get_tracer("client").start_as_current_span("mine") as span:
    sent = app.send_task("warmq.generate", args=[{"prompt": "Hello"}], queue="warmq")
print(sent.get(timeout=30)["object"], f"{span.get_span_context().trace_id:032x}")
"""


def test_a_celery_client_with_opentelemetrys_instrumentation_sees_its_request_in_its_own_trace(
    redis_url: str, tmp_path: Path, receiver: Receiver
) -> None:
    with simulated(redis_url, tmp_path / "worker.log", traces=0):
        done = subprocess.run(
            [sys.executable, "-c", INSTRUMENTED, redis_url],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (span,) = receiver.wait_for("process ")
    assert done.stdout.split() == ["text_completion", span.trace_id]
    assert span.parent_id


def test_requests_of_a_batch_whose_maker_wants_no_trace_are_not_sampled() -> None:
    def refuse(span: Span) -> None:
        raise AssertionError(span)

    def sampled(maker: SpanContext | None) -> bool:
        headers = maker.headers() if maker else {}
        delivery = Delivery(
            "w/1", "r", "warmq.generate", "b", "", "", 0, None, None, None, None, False, headers, {}
        )
        return _context(Tracer(1, refuse), delivery).sampled

    assert sampled(None)
    assert sampled(root_context(sampled=True))
    assert not sampled(root_context(sampled=False))


@pytest.mark.parametrize("order", ["input", "prefix"])
def test_a_batch_of_the_command_line_is_one_trace_and_its_sampled_requests_are_linked(
    redis_url: str, tmp_path: Path, receiver: Receiver, order: str
) -> None:
    file = lines(tmp_path / "in.jsonl", 300)
    words = ("submit", str(file), "--batch-id", "traced", "--order", order, "--wait")
    with simulated(redis_url, tmp_path / "worker.log", traces=0.2):
        producer(redis_url, *words, traces=0.2)
        (batch,) = receiver.wait_for("send ")
        assert not batch.parent_id
        assert batch.attributes["messaging.batch.message_count"] == 300
        plans = receiver.named("plan ")
        assert [one.parent_id for one in plans] == [batch.span_id] * (order == "prefix")
        found = receiver.wait_for("process ", 30)
    requests = receiver.named("process ")
    assert len(found) <= len(requests) <= 100, "about one in five"
    assert {one.links[0] for one in requests} == {(batch.trace_id, batch.span_id)}
    assert len({one.trace_id for one in requests}) == len(requests)
    assert not any(one.parent_id for one in requests)


def test_without_the_setting_no_header_is_written_and_opentelemetry_is_not_imported(
    redis_url: str, tmp_path: Path, receiver: Receiver
) -> None:
    file = lines(tmp_path / "in.jsonl", 3)
    producer(redis_url, "submit", str(file), "--batch-id", "plain", traces=None)
    store = BatchStore.open(redis_url, "test", ttl_ms=60_000)
    batch = store.batch("plain")
    assert batch is not None and "traceparent" not in batch.fields
    messages = [
        raw for key in store.queue_lengths(QUEUE) for raw in store._client.lrange(key, 0, -1)
    ]
    assert len(messages) == 3
    assert not any(b"traceparent" in raw for raw in messages)
    store.close()
    look = (
        "import sys, worker.process.bootstep, gateway.app, producer.cli.commands.submit\n"
        "print(*[name for name in sys.modules if name.startswith(('opentelemetry.sdk.trace',"
        " 'opentelemetry.exporter', 'contract.traces.otlp'))])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()
    assert not receiver.spans


def test_a_collector_that_is_away_keeps_neither_requests_nor_the_stop(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    file, out = lines(tmp_path / "in.jsonl", 2000), tmp_path / "out.jsonl"
    with simulated(redis_url, tmp_path / "worker.log", traces=1) as worker:
        producer(redis_url, "submit", str(file), "-o", str(out), traces=1)
        began = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - began < 28, "the exporter by itself waits for 30 s"
    assert len(out.read_text().splitlines()) == 2000


def test_what_cannot_be_exported_to_is_said_at_the_start(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    worker = simulated(redis_url, tmp_path / "worker.log", traces=1).start()
    assert worker.process is not None
    assert worker.process.wait(30) == 1
    assert (
        "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; give http/protobuf or grpc"
        in worker.log_path.read_text()
    )


def test_a_request_whose_engine_dies_has_a_span_for_each_attempt_in_one_trace(
    tmp_path: Path, receiver: Receiver
) -> None:
    with (
        RedisServer(tmp_path / "redis") as server,
        simulated(server.url, tmp_path / "worker.log", traces=0, max_deaths=1),
        client_app(server.url) as app,
    ):
        result = send(app, BODY | {"user": "simulate:die"})
        eventually(lambda: receiver.named("process "), 60, "the first attempt's span has come")
        first = receiver.named("process ")[0]
        assert first.failed
        assert first.attributes["error.type"] == "engine_died"
        assert first.attributes["warmq.attempt"] == 1
        assert first.attributes["messaging.message.id"] == result.id
        result.forget()


@pytest.mark.parametrize(
    "text",
    ["", "00", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
     "ff-" + "1" * 32 + "-" + "1" * 16 + "-01", "00-" + "1" * 32 + "-" + "1" * 16 + "-01-x",
     "00-" + "G" * 32 + "-" + "1" * 16 + "-01", None, 7, ["00"]],
)  # fmt: skip
def test_a_header_that_is_no_traceparent_counts_as_none(text: object) -> None:
    assert read_context(text) is None


def test_a_context_is_read_as_it_was_written_also_of_a_later_version() -> None:
    context = root_context(sampled=True)
    assert read_context(context.traceparent) == context
    later = context.traceparent.replace("00-", "01-", 1) + "-more"
    assert read_context(later, "vendor=1") == type(context)(
        context.trace_id, context.span_id, True, "vendor=1"
    )
    assert context.child().trace_id == context.trace_id
