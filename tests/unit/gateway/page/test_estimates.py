"""Times left on the page: of batches with several queues, with lines that are not queued yet."""

from __future__ import annotations

from typing import Any

import pytest

from contract.batch import Batch
from contract.redis.pace import Pace
from gateway.batches.api.record import BatchPart, BatchRecord
from gateway.page.estimates import estimates, works_of
from producer.time_left import Outlook, Work

RECORD = BatchRecord(
    id="batch_1", tenant="t", endpoint="/v1/chat/completions", input_file_id="file-1",
    completion_window="24h", created_at=0, expires_at=0, priority=5,
    parts=[BatchPart("p1", "a", "warmq.a"), BatchPart("p2", "b", "warmq.b")],
)  # fmt: skip


def part(name: str, total: int, completed: int, tokens: int = 0) -> Batch:
    fields = {"total": total, "completed": completed, "prompt_tokens": tokens}
    return Batch(name, {key: str(value) for key, value in fields.items()})


def row(works: Any, **fields: Any) -> dict[str, Any]:
    return {
        "ended": False, "cached": 0, "tokens_in": 0, "created_at": 0, "ended_at": None,
        "queues": list(works), "works": works,
    } | fields  # fmt: skip


def state(pace: Pace, worker: str = "w") -> Outlook:
    return Outlook(pace, workers=frozenset({worker}))


def test_the_queues_of_a_batch_run_concurrently_and_the_longest_counts() -> None:
    works = works_of(RECORD, [part("p1", 10, 5, 50), part("p2", 40, 10, 100)], 50)
    assert works == {
        "warmq.a": [Work("p1", "t", 3, 5, 5, 50)], "warmq.b": [Work("p2", "t", 3, 30, 10, 100)],
    }  # fmt: skip
    queues = {"warmq.a": state(Pace(1.0, 1), "a"), "warmq.b": state(Pace(1.0, 2), "b")}
    assert estimates(row(works), queues)["left_s"] == 150
    assert estimates(row(works), {"warmq.a": queues["warmq.a"]})["left_s"] is None


def test_lines_that_the_runner_has_not_queued_yet_count() -> None:
    works = works_of(RECORD, [part("p1", 10, 0), part("p2", 30, 0)], 80)
    assert [work.left for several in works.values() for work in several] == [20, 60]


@pytest.mark.parametrize("total", [0, 12])
def test_nothing_left_is_no_time(total: int) -> None:
    batch = Batch("b1", {"queue": "warmq", "total": str(total), "completed": str(total)})
    found = estimates(row(works_of(batch, [], total)), {"warmq": state(Pace(1.0, 1, 9.0))})
    assert found["left_s"] is None


@pytest.mark.parametrize(("cached", "share"), [(0, None), (15, 0.15)])
def test_a_share_counts_only_the_tokens_of_the_batch(cached: int, share: float | None) -> None:
    ended = row({}, ended=True, created_at=60, ended_at=150, queues=["warmq"])
    found = estimates(ended | {"cached": cached, "tokens_in": 100}, {"warmq": None})
    assert found == {"cached_share": share, "left_s": None}
