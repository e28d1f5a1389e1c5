"""Traces through a real gateway and a real worker, as a real OTLP receiver gets them."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest
from kit.gateways.live_stack import HELLO, MODEL, QUEUE, Stack
from kit.servers.otlp_receiver import Received, Receiver, otlp_receiver

from contract.traces import SpanContext, root_context
from demo.stack import eventually

SERVER, PRODUCER, CONSUMER = 2, 4, 5


@pytest.fixture(scope="module", params=["http/protobuf", "grpc"])
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with otlp_receiver(request.param) as receiving, pytest.MonkeyPatch.context() as patch:
        for name, value in receiving.environment.items():
            patch.setenv(name, value)
        yield receiving


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Stack]:
    """One that samples nothing by itself: what is traced was asked for by a caller, or failed."""
    with Stack(tmp_path_factory.mktemp("traced"), traces=0) as made:
        yield made


def asked(stack: Stack, *, sampled: bool = True, **fields: object) -> SpanContext:
    """Ask as a client that traces does; return its span."""
    context = root_context(sampled=sampled)
    stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, extra_headers=context.headers(), extra_body=fields
    )
    return context


def spans_of(receiver: Receiver, context: SpanContext, count: int) -> dict[str, Received]:
    """Return a trace's spans by the first word of their names, as soon as there are so many."""

    def look() -> list[Received] | None:
        found = [one for one in receiver.spans if one.trace_id == f"{context.trace_id:032x}"]
        return found if len(found) >= count else None

    found = eventually(look, 30, f"{count} spans of the trace have come")
    assert len(found) == count
    return {one.name.split()[0]: one for one in found}


def test_an_online_request_is_one_trace_from_its_caller_to_the_worker(
    stack: Stack, receiver: Receiver
) -> None:
    context = asked(stack)
    found = spans_of(receiver, context, 3)
    post, send, process = found["POST"], found["send"], found["process"]
    assert post.parent_id == f"{context.span_id:016x}"
    assert send.parent_id == post.span_id
    assert process.parent_id == send.span_id
    assert (post.kind, send.kind, process.kind) == (SERVER, PRODUCER, CONSUMER)
    assert (post.service, process.service) == ("warmq-gateway", "warmq-worker")
    assert post.name == "POST /v1/chat/completions"
    assert post.attributes["http.response.status_code"] == 200
    assert send.name == f"send {QUEUE}"
    assert process.name == f"process {QUEUE}"
    assert process.attributes["messaging.message.id"] == send.attributes["messaging.message.id"]
    assert (
        process.attributes
        | {
            "messaging.system": "celery",
            "messaging.operation.type": "process",
            "messaging.destination.name": QUEUE,
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "simulated",
            "gen_ai.request.model": MODEL,
            "gen_ai.usage.input_tokens": 1,
            "gen_ai.usage.output_tokens": 1,
            "gen_ai.response.finish_reasons": ["stop"],
            "warmq.outcome": "completed",
            "warmq.attempt": 1,
        }
        == process.attributes
    )
    assert not any(span.failed for span in found.values())


def test_a_caller_that_does_not_sample_and_one_that_says_nothing_are_not_traced(
    stack: Stack, receiver: Receiver
) -> None:
    unsampled = asked(stack, sampled=False)
    before = len(receiver.spans)
    stack.client.chat.completions.create(model=MODEL, messages=HELLO)
    spans_of(receiver, asked(stack), 3)  # spans come in order: the others' would be there
    assert len(receiver.spans) == before + 3
    assert f"{unsampled.trace_id:032x}" not in {one.trace_id for one in receiver.spans}


def test_a_request_that_fails_is_exported_although_it_was_not_sampled(
    stack: Stack, receiver: Receiver
) -> None:
    context = root_context(sampled=False)
    with pytest.raises(Exception, match="simulated"):
        stack.client.chat.completions.create(
            model=MODEL, messages=HELLO, user="simulate:fail", extra_headers=context.headers()
        )
    found = spans_of(receiver, context, 3)
    assert found["process"].failed
    assert found["process"].attributes["error.type"] == "request_failed"
    assert found["process"].parent_id == found["send"].span_id
    assert found["POST"].failed


def test_a_batch_has_its_own_trace_and_its_requests_are_linked_to_it(
    stack: Stack, receiver: Receiver
) -> None:
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": MODEL, "messages": HELLO, "user": "simulate:fail" if n == 3 else ""}}
        for n in range(5)
    ]  # fmt: skip
    content = b"\n".join(map(orjson.dumps, lines))
    file = stack.client.files.create(file=("in.jsonl", content), purpose="batch")
    context = root_context(sampled=True)
    batch = stack.client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
        extra_headers=context.headers(),
    )  # fmt: skip

    def ended() -> bool:
        return stack.client.batches.retrieve(batch.id).status == "completed"

    eventually(ended, 60, "the batch completes")
    found = spans_of(receiver, context, 3)
    post, send, finalise = found["POST"], found["send"], found["finalise"]
    assert post.parent_id == f"{context.span_id:016x}"
    assert send.parent_id == post.span_id
    assert finalise.parent_id == send.span_id
    assert send.attributes["messaging.batch.message_count"] == 5

    def linked() -> list[Received]:
        link = (send.trace_id, send.span_id)
        return [one for one in receiver.named("process ") if link in one.links]

    # The others were not sampled; the worker sends its spans when it likes.
    (failed,) = eventually(linked, 30, "the failed request's span has come")
    assert failed.attributes["warmq.custom_id"] == "c3"
    assert failed.trace_id != send.trace_id
    assert not failed.parent_id
