"""Online requests for a model that no worker can load: when they are refused, and when queued."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from contract.version import PROTOCOL
from gateway.http.errors import ApiError
from gateway.online.models import Models
from gateway.redis.online import OnlineRequests


class Announced:
    """A Redis with the announcement of one worker that cannot load model `b`."""

    def __init__(self, again_in_s: float) -> None:
        again_at = int((time.time() + again_in_s) * 1000)
        self.worker: dict[str, Any] = {
            "id": "w", "silent_s": 0.0, "queue": "warmq.a", "protocol": PROTOCOL,
            "models": {"a": "warmq.a", "b": "warmq.b"},
            "unloadable": {"b": {"why": "no memory", "tries": 1, "again_at": again_at}},
        }  # fmt: skip

    async def workers(self) -> tuple[list[dict[str, Any]], float]:
        """Return the announcement and the time."""
        return [self.worker], time.time()


def models(redis: Announced) -> Models:
    return Models(cast(OnlineRequests, redis), "warmq", "")


async def test_it_is_refused_until_the_worker_tries_again() -> None:
    redis = Announced(20)
    known = models(redis)
    with pytest.raises(ApiError) as caught:
        await known.queue_and_name("b", None)
    error = caught.value
    assert (error.status, error.code) == (503, "model_unloadable")
    assert error.headers["retry-after"] == "20"
    assert "no memory" in error.message
    assert await known.queue_and_name("a", None) == ("warmq.a", "a")


@pytest.mark.parametrize("again_in_s", [-1, 10_000])
async def test_it_is_queued_when_the_worker_may_try_again_or_its_clock_is_wrong(
    again_in_s: float,
) -> None:
    assert await models(Announced(again_in_s)).queue_and_name("b", None) == ("warmq.b", "b")


async def test_it_is_queued_once_a_worker_has_loaded_it() -> None:
    redis = Announced(20)
    redis.worker |= {"queue": "warmq.b", "unloadable": {}}
    assert await models(redis).queue_and_name("b", None) == ("warmq.b", "b")


async def test_a_request_that_may_wait_is_queued_where_online_ones_are_refused() -> None:
    redis = Announced(20)
    redis.worker |= {"unloadable": {}}
    known = Models(cast(OnlineRequests, redis), "warmq", "", refuses=True)
    with pytest.raises(ApiError) as caught:
        await known.queue_and_name("b", None)
    assert caught.value.code == "model_not_loaded"
    assert await known.queue_and_name("b", None, may_wait=True) == ("warmq.b", "b")
