"""The remedy in an error of Redis."""

from __future__ import annotations

import pytest
from redis import exceptions

from contract.redis.client import translated


@pytest.mark.parametrize(
    "text", ["Timeout reading from 127.0.0.1:7691", "Timeout reading from socket"]
)
def test_a_server_that_answers_late_is_not_called_absent(text: str) -> None:
    message = translated(exceptions.TimeoutError(text)).message
    assert "busy" in message
    assert "WARMQ_REDIS_URL" not in message


@pytest.mark.parametrize("error", [
    exceptions.TimeoutError("Timeout connecting to server"),
    exceptions.ConnectionError("Error 111 connecting to 127.0.0.1:1. Connection refused."),
])  # fmt: skip
def test_a_server_that_was_not_reached_may_be_absent(error: Exception) -> None:
    assert "WARMQ_REDIS_URL" in translated(error).message
