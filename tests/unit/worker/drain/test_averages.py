"""What a worker announces as usual: lengths of prompts and answers, and the share of full slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worker.drain.counts import Averages, Counts
from worker.drain.events import Committed, Events


class Worker:
    """Counts endings, and is looked at every second."""

    characters = 0

    def __init__(self) -> None:
        self.events = Events()
        self.averages = Averages(Counts(self.events))

    def second(self, answers: int, tokens: int, running: int = 8) -> dict[str, Any]:
        ending = SimpleNamespace(
            outcome="completed", prompt_tokens=100, completion_tokens=tokens,
            characters=self.characters, text_tokens=90 if self.characters else 0,
        )  # fmt: skip
        self.events.publish(Committed([ending] * answers))  # type: ignore[list-item]
        self.averages.update(running, 8, 1.0)
        return self.averages.as_json()


def test_nothing_is_known_before_an_answer() -> None:
    worker = Worker()
    worker.averages.update(0, 0, 1.0)
    assert worker.averages.as_json() == {}


def test_answers_and_prompts_have_their_mean_length() -> None:
    worker = Worker()
    worker.second(1, 10)
    assert worker.second(1, 20) == {
        "mean_answer": pytest.approx(15.0, rel=0.01), "mean_prompt": 100.0, "slots_full": 1.0,
    }  # fmt: skip


def test_the_characters_of_a_token_are_those_of_prompts_that_are_only_text() -> None:
    worker = Worker()
    worker.characters = 180
    worker.second(3, 10)
    worker.characters = 0  # pictures, for example
    assert worker.second(5, 10)["token_characters"] == 2.0


def test_the_latest_answers_count_most() -> None:
    worker = Worker()
    for _ in range(50):
        worker.second(100, 10)
    for _ in range(50):
        found = worker.second(100, 200)
    assert found["mean_answer"] > 190


def test_seconds_with_free_slots_show_and_idle_ones_do_not() -> None:
    worker = Worker()
    worker.second(1, 10, running=9)  # one is committed
    assert worker.second(1, 10, running=2)["slots_full"] == pytest.approx(0.5, abs=0.01)
    assert worker.second(0, 0, running=0)["slots_full"] == pytest.approx(0.5, abs=0.01)
