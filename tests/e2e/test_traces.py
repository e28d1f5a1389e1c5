"""From the SDK's call to vLLM's own span of the request, as a real OTLP receiver gets them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from kit.gateways.gateway_process import GatewayProcess
from kit.servers.otlp_receiver import Received, Receiver, otlp_receiver
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from contract.redis import keys
from contract.traces import root_context
from demo.stack import RedisServer, eventually, tiny_model_worker

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
MODEL, FRONT_ENDS = "tiny", 2
SAY: Any = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiving, pytest.MonkeyPatch.context() as patch:
        for name, value in receiving.environment.items():
            patch.setenv(name, value)
        yield receiving


@pytest.fixture(scope="module")
def tracer(receiver: Receiver) -> Iterator[Tracer]:
    """The caller's own, of OpenTelemetry's SDK."""
    provider = TracerProvider(resource=Resource.create({"service.name": "caller"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
    yield provider.get_tracer("test")
    provider.shutdown()


@pytest.fixture(scope="module")
def client(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder: Path = tmp_path_factory.mktemp("traced")
    settings: Any = {"traces": 0, "front_ends": FRONT_ENDS}
    with (
        RedisServer(folder / "redis") as server,
        server.client() as redis_client,
        tiny_model_worker(
            server.url, folder / "worker.log", served_model_name=MODEL, **settings
        ) as worker,
        GatewayProcess(server.url, folder, traces=0) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as made,
    ):

        def ready() -> bool:
            assert worker.process is not None and worker.process.poll() is None
            # Each front end announces itself; for readers they are one worker.
            found = [
                orjson.loads(raw.partition(b"\0")[2]) for raw in redis_client.hvals(keys.WORKERS)
            ]
            return [one["state"] for one in found] == ["ready"] * FRONT_ENDS

        eventually(ready, 200, "both front ends are ready: each exports what it runs itself")
        yield made


def trace_of(receiver: Receiver, trace_id: str, engine_spans: int = 1) -> list[Received]:
    def look() -> list[Received] | None:
        found = [one for one in receiver.spans if one.trace_id == trace_id]
        return found if len(found) >= 4 + engine_spans else None

    found = eventually(look, 30, "the spans of the trace have come")
    assert len(found) == 4 + engine_spans
    return list(found)


def test_a_call_of_the_sdk_is_one_trace_down_to_vllms_own_span_whichever_way_it_takes(
    client: openai.OpenAI, tracer: Tracer, receiver: Receiver
) -> None:
    # Past vLLM's serving classes once their form is known, which the second request teaches.
    for _ in range(4):
        with tracer.start_as_current_span("ask") as span:
            headers: dict[str, str] = {}
            inject(headers)
            client.chat.completions.create(
                model=MODEL, messages=SAY, max_tokens=8, extra_headers=headers
            )
        trace_id = f"{span.get_span_context().trace_id:032x}"
        found = {one.name.split()[0]: one for one in trace_of(receiver, trace_id)}
        assert found.keys() == {"ask", "POST", "send", "process", "llm_request"}
        assert found["POST"].parent_id == found["ask"].span_id
        assert found["send"].parent_id == found["POST"].span_id
        assert found["process"].parent_id == found["send"].span_id
        assert found["llm_request"].parent_id == found["process"].span_id
        engine, ours = found["llm_request"].attributes, found["process"].attributes
        assert engine["gen_ai.usage.completion_tokens"] == ours["gen_ai.usage.output_tokens"]
        assert engine["gen_ai.usage.prompt_tokens"] == ours["gen_ai.usage.input_tokens"]
        assert 0 < engine["gen_ai.latency.time_to_first_token"] < found["process"].seconds
        assert found["process"].service == found["llm_request"].service == "warmq-worker"
        # What comes after it, of the same form, is not traced with it.
        unsampled = root_context(sampled=False)
        client.chat.completions.create(
            model=MODEL, messages=SAY, max_tokens=8, extra_headers=unsampled.headers()
        )
    assert len(receiver.named("llm_request")) == 4


def test_each_choice_of_a_request_has_a_span_of_vllms_below_the_same_parent(
    client: openai.OpenAI, tracer: Tracer, receiver: Receiver
) -> None:
    with tracer.start_as_current_span("ask twice") as span:
        headers: dict[str, str] = {}
        inject(headers)
        client.completions.create(
            model=MODEL, prompt="2 + 3 =", n=2, max_tokens=4, extra_headers=headers
        )
    found = trace_of(receiver, f"{span.get_span_context().trace_id:032x}", engine_spans=2)
    (process,) = (one for one in found if one.name.startswith("process "))
    engine = [one for one in found if one.name == "llm_request"]
    assert [one.parent_id for one in engine] == [process.span_id] * 2


def test_each_front_end_exports_what_it_runs_with_vllms_spans_from_the_same_process(
    client: openai.OpenAI, receiver: Receiver
) -> None:
    def asked() -> bool:
        headers = root_context(sampled=True).headers()
        client.completions.create(model=MODEL, prompt="2 + 3 =", extra_headers=headers)
        return len({one.pid for one in receiver.named("process ")}) == FRONT_ENDS

    eventually(asked, 60, "both front ends have exported")
    count = len(receiver.named("process "))
    engine = receiver.wait_for("llm_request", count)  # one has two, for its two choices
    process_of = {one.span_id: one.pid for one in receiver.named("process ")}
    assert all(
        process_of[one.parent_id] == one.pid for one in engine if one.parent_id in process_of
    )
