"""What readers learn from the announcement of a worker with several models."""

from __future__ import annotations

from typing import Any

import pytest

from contract.redis.announced_models import adapters_of, load_seconds
from contract.redis.announcements import names_of

MODELS = {"chat": "warmq.chat", "judge": "warmq.judge", "third": "warmq.third"}


def worker(**more: Any) -> dict[str, Any]:
    """Return the announcement of a worker that has loaded `chat`."""
    loads = {"chat": {"loaded": 1, "seconds": 9.0}, "judge": {"loaded": 2, "seconds": 24.0}}
    return {"id": "w", "state": "ready", "queue": "warmq.chat", "models": MODELS,
            "loads": loads} | more  # fmt: skip


@pytest.mark.parametrize(("queues", "workers", "seconds"), [
    (["warmq.chat"], [worker()], 0.0),
    (["warmq.judge"], [worker()], 12.0),
    (["warmq.third"], [worker()], 0.0),  # its load was never measured
    (["warmq.chat", "warmq.judge"], [worker(state="swapping")], 21.0),
    (["warmq.judge"], [worker(), worker(queue="warmq.judge")], 0.0),
    (["warmq"], [{"id": "v", "queue": "warmq", "state": "ready"}], 0.0),
    (["warmq.judge"], [], 0.0),
])  # fmt: skip
def test_models_that_no_worker_has_loaded_take_the_mean_of_their_loads(
    queues: list[str], workers: list[dict[str, Any]], seconds: float
) -> None:
    assert load_seconds(workers, queues) == seconds


def test_adapters_of_models_that_are_not_loaded_are_names_of_their_queues() -> None:
    one = worker(adapters=["french"], model_adapters={
        "chat": ["french", "sql"], "judge": ["strict", "french"], "third": ["chat", "judge"],
    })  # fmt: skip
    assert dict(names_of(one, "warmq")) == {
        "chat": "warmq.chat", "judge": "warmq.judge", "third": "warmq.third",
        "french": "warmq.chat", "sql": "warmq.chat", "strict": "warmq.judge",
    }  # fmt: skip


@pytest.mark.parametrize("junk", [1, [], {"chat": 1}, {"chat": [3, {}]}, {"other": ["x"]}], ids=str)
def test_adapters_that_cannot_be_read_are_passed_over(junk: object) -> None:
    one = worker(model_adapters=junk)
    assert adapters_of(one) == []
    assert set(dict(names_of(one, "warmq"))) == set(MODELS)
