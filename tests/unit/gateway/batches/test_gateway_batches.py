"""Batches over HTTP without Redis: windows of time, limits of pages, what callers see."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types import Batch as SdkBatch

from contract.batch import Batch as QueueBatch
from contract.redis.objects import Stored
from gateway.batches.api.batches import window_s
from gateway.batches.api.protocol import Batch, batch_object
from gateway.batches.api.record import (
    BatchError,
    BatchPart,
    BatchRecord,
    RequestCounts,
    Usage,
    encode,
)
from gateway.http.errors import ApiError
from gateway.http.json_api import page_limit
from gateway.redis.batch_views import BatchView


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("24h", 86_400), ("90m", 5_400), ("7d", 604_800), ("1s", 1), ("1h30m", 5_400),
        ("1.5h", 5_400), ("1d12h", 129_600), ("3600s", 3_600), ("3650d", 315_360_000),
    ],
)  # fmt: skip
def test_a_window_is_a_duration(text: str, seconds: int) -> None:
    assert window_s(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "24", "h", "24 h", "-1h", "0s", "0.4s", "1w", "24H", "1e3s", "4000d", "inf", "٣h",
     "1h" * 30, "9" * 400 + "s", "1.h", ".5h"],
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        window_s(text)
    assert (caught.value.status, caught.value.param) == (400, "completion_window")
    assert "give a duration" in caught.value.message
    assert len(caught.value.message) < 200


def test_a_page_has_the_default_size_unless_another_is_asked_for() -> None:
    assert (page_limit(None, 20, 100), page_limit("1", 20, 100), page_limit("100", 20, 100)) == (
        20, 1, 100
    )  # fmt: skip


def stored(*counters: QueueBatch, **fields: Any) -> BatchView:
    """Return the view of a batch made over HTTP; `counters` are those of its parts."""
    record = BatchRecord(
        id="batch_1", tenant="t", endpoint="/v1/chat/completions", input_file_id="file-1",
        completion_window="24h", created_at=100, expires_at=86_500, **fields,
    )  # fmt: skip
    return BatchView("batch_1", Stored("batch_1", encode(record), 1), list(counters))


def queued(**fields: object) -> BatchView:
    """Return the view of a batch of `producer submit`."""
    state = {"created_at": "100500", "total": "4", "valid": "4"} | fields
    return BatchView("b1", QueueBatch("b1", {n: str(v) for n, v in state.items()}), [])


def seen(view: BatchView, **options: bool) -> Batch:
    """Return what callers see; the SDK must read it strictly."""
    found = batch_object(view, **options)
    assert found is not None
    SdkBatch.model_validate_json(msgspec.json.encode(found), strict=True)
    return found


def test_a_new_batch_has_zeros_and_nulls_and_no_model() -> None:
    sent = msgspec.to_builtins(seen(stored()))
    assert sent["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert "model" not in sent
    for name in ("errors", "output_file_id", "error_file_id", "completed_at", "metadata"):
        assert sent[name] is None
    assert sent["usage"]["input_tokens_details"] == {"cached_tokens": 0}


def test_times_are_those_at_which_a_status_began() -> None:
    at = {"in_progress": 110, "finalizing": 120, "completed": 130}
    batch = seen(stored(status="completed", changed_at={"validating": 100} | at))
    assert (batch.in_progress_at, batch.finalizing_at, batch.completed_at) == (110, 120, 130)
    assert (batch.failed_at, batch.cancelled_at, batch.expires_at) == (None, None, 86_500)


def test_a_refused_file_has_a_list_of_errors_even_if_it_is_empty() -> None:
    problems = [BatchError("duplicate_custom_id", "twice", "custom_id", 3)]
    batch = seen(stored(status="failed", problems=problems))
    assert batch.errors is not None
    assert msgspec.to_builtins(batch.errors.data) == [
        {"code": "duplicate_custom_id", "message": "twice", "param": "custom_id", "line": 3}
    ]
    nothing = seen(stored(status="failed")).errors
    assert nothing is not None
    assert nothing.data == []


def test_the_final_counts_do_not_depend_on_the_queue() -> None:
    late = QueueBatch("batch_1", {"total": "9", "completed": "9"})
    batch = seen(stored(late, status="completed", counts=RequestCounts(4, 3, 1), usage=Usage(5, 6)))
    assert batch.request_counts.total == 4
    assert batch.usage.total_tokens == 11


def test_an_early_output_is_shown_to_those_who_ask_while_the_batch_runs() -> None:
    parts = [BatchPart("batch_1", "", "warmq")]
    assert seen(stored(status="in_progress", parts=parts)).output_file_id is None
    early = seen(stored(status="in_progress", parts=parts), partial=True)
    assert early.output_file_id == "file-partial-batch_1"
    assert seen(stored(), partial=True).output_file_id is None
    ended = seen(stored(status="completed", parts=parts, output_file_id="file-2"), partial=True)
    assert ended.output_file_id == "file-2"


def test_a_batch_of_another_api_is_not_shown() -> None:
    assert batch_object(stored(api="anthropic")) is None


@pytest.mark.parametrize(
    ("fields", "status", "output", "errors"),
    [
        ({}, "validating", None, None),
        ({"sealed": 1}, "in_progress", None, None),
        ({"sealed": 1, "completed": 4, "finished_at": 9000}, "completed", "file-out-b1", None),
        (
            {"sealed": 1, "completed": 3, "failed": 1, "finished_at": 9000},
            "completed", "file-out-b1", "file-err-b1",
        ),
        ({"sealed": 1, "failed": 4, "finished_at": 9000}, "completed", None, "file-err-b1"),
        ({"sealed": 1, "expired": 4, "finished_at": 9000}, "expired", None, "file-err-b1"),
        ({"sealed": 1, "cancelling": 1}, "cancelling", None, None),
        (
            {"sealed": 1, "cancelling": 1, "completed": 1, "cancelled": 3, "finished_at": 9000},
            "cancelled", "file-out-b1", "file-err-b1",
        ),
        (
            {"sealed": 1, "valid": 0, "failed": 4, "finished_at": 9000},
            "failed", None, "file-err-b1",
        ),
    ],
)  # fmt: skip
def test_a_submitted_batch_has_openais_status_and_files(
    fields: dict[str, int], status: str, output: str | None, errors: str | None
) -> None:
    batch = seen(queued(**fields))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == (status, output, errors)
    assert (batch.errors is None) == (status != "failed")
    if "finished_at" in fields:
        assert getattr(batch, f"{status}_at") == 9


def test_a_submitted_batch_tells_where_it_comes_from() -> None:
    batch = seen(queued(model="m", input="in.jsonl", deadline=100_500 + 7_200_000))
    assert batch.model == "m"
    assert batch.metadata == {"submitted_by": "producer submit", "input": "in.jsonl"}
    assert (batch.completion_window, batch.expires_at, batch.created_at) == ("2h", 7_300, 100)
    assert seen(queued()).completion_window == "none"


def test_a_run_is_submitted_by_producer_run() -> None:
    state = {"created_at": "100500", "total": "4", "valid": "4", "windows": "1"}
    run = BatchView("x", QueueBatch("run_0123456789abcdef", state), [])
    assert (seen(run).metadata or {})["submitted_by"] == "producer run"
