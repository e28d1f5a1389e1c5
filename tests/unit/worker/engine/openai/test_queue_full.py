"""No request fails because a vLLM server has enough queued (a simulated clock)."""

from __future__ import annotations

import time

import pytest
from kit.drain.simulated_drain import Outcome, SimulatedDrain, line
from kit.drain.simulated_time import run_simulated
from kit.servers.simulated_server import Json, Reply, SimulatedServer, answer, page
from kit.servers.stub_server import FULL

from worker.engine.openai.retries import Unanswered
from worker.engine.openai.upstream import Upstream

#: The error text of vLLM's MaxQueuedTokensError.
TOKENS = (
    "The engine has reached its prefill token backlog limit. "
    "Please try again later or on a different instance."
)


@pytest.fixture(autouse=True)
def _unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the servers of other tests."""
    monkeypatch.setattr(Upstream, "were_well", set(), raising=False)


@pytest.mark.parametrize("words", [FULL, TOKENS])
def test_a_line_that_is_refused_for_an_hour_while_the_rest_is_answered_is_answered_then(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, refused, began = SimulatedServer(), 0, None
    full = {"message": words, "type": "Service Unavailable", "param": None, "code": 503}

    def post(_: str, body: Json) -> Reply:
        nonlocal refused, began
        began = began or time.monotonic()
        if body.get("user") == "unlucky" and time.monotonic() < began + 3600:
            refused += 1
            return page(503, {"error": full})
        return answer(body, 100.0)

    server.post = post

    async def main() -> Outcome:
        lines = [line(0, user="unlucky"), *map(line, range(1, 9000))]
        return await SimulatedDrain(server, monkeypatch).run(lines)

    ended = run_simulated(main(), monkeypatch)
    assert ended.failed == {}
    assert len(ended.completed) == 9000
    assert (ended.deaths, ended.engines) == (0, 1)
    assert refused > 30


def test_only_the_texts_of_a_full_queue_are_one() -> None:
    assert Unanswered(503, FULL).queue_full
    assert Unanswered(503, TOKENS).queue_full
    assert not Unanswered(503, "service unavailable").queue_full
    assert not Unanswered(429, FULL).queue_full
