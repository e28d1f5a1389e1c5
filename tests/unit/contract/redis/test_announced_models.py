"""What readers learn from the announcement of a worker with several models."""

from __future__ import annotations

from typing import Any

import pytest

from contract.redis.announced_models import load_seconds

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
