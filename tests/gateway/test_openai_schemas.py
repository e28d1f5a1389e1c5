"""The judge itself: what it lets pass, and what not."""

from __future__ import annotations

from typing import Any

import pytest
from kit.gateways.answer_schemas import EVENTS, JSON, fault_of, faults_in, schema_of, validates

BATCH: Any = {
    "id": "batch_1", "object": "batch", "endpoint": "/v1/chat/completions", "errors": None,
    "input_file_id": "file-1", "completion_window": "24h", "status": "validating",
    "output_file_id": None, "created_at": 1711471533,
    "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": None,
}  # fmt: skip


def test_a_batch_as_the_documents_own_example_has_it_passes() -> None:
    validates("Batch", BATCH)


@pytest.mark.parametrize(
    "wrong",
    [{"status": "queued"}, {"created_at": None}, {"request_counts": {"total": 1}}, {"id": 3},
     {"errors": {"object": "list", "data": {}}}],
)  # fmt: skip
def test_a_batch_that_is_wrong_in_one_field_is_found(wrong: Any) -> None:
    assert fault_of("Batch", BATCH | wrong) is not None


def test_routes_have_the_schemas_of_the_document() -> None:
    assert schema_of("GET", "/v1/batches/batch_1", JSON) == "Batch"
    assert schema_of("GET", "/v1/models/org/name", JSON) == "Model"
    assert schema_of("POST", "/v1/uploads/upload_1/parts", JSON) == "UploadPart"
    stream = schema_of("POST", "/v1/chat/completions", EVENTS)
    assert stream == "CreateChatCompletionStreamResponse"
    assert schema_of("POST", "/v1/rerank", JSON) is None


def test_an_error_without_the_envelope_is_found() -> None:
    assert faults_in("GET", "/v1/nothing", 404, JSON, b'{"detail":"Not Found"}')
    assert faults_in("GET", "/v1/nothing", 404, "text/plain", b"Not Found")
    whole = b'{"error":{"message":"m","type":"t","param":null,"code":null}}'
    assert not faults_in("GET", "/v1/nothing", 404, JSON, whole)
    assert faults_in("GET", "/v1/nothing", 404, JSON, whole.replace(b',"code":null', b""))


def test_a_stream_is_judged_event_by_event() -> None:
    chunk = (
        b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
        b'"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    )
    url = "/v1/chat/completions"
    assert not faults_in("POST", url, 200, EVENTS, b": wait\n\n" + chunk + b"data: [DONE]\n\n")
    assert faults_in("POST", url, 200, EVENTS, chunk.replace(b'"index":0,', b""))
    assert faults_in("POST", url, 200, EVENTS, chunk + b'data: {"error":"broken"}\n\n')
