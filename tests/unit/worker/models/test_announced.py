"""What a worker announces of its models: its last swaps, and models that cannot be loaded."""

from __future__ import annotations

import pytest

from worker.models import announced
from worker.models.announced import LONGEST_RETRY_S, MOST_SWAPS, RETRY_S, AnnouncedModels

QUEUES = {"a": "warmq.a", "b": "warmq.b"}


class Clock:
    """Stands for the module `time`."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(announced, "time", clock)
    return clock


@pytest.mark.usefixtures("clock")
def test_swaps_are_announced_with_their_reasons() -> None:
    models = AnnouncedModels(QUEUES)
    models.begin("a", "it is named first")
    assert models.fields["swaps"] == []
    models.note_loaded("a", 2.04)
    models.begin("b", "x" * 1000)
    models.note_loaded("b", 3.0)
    first, second = models.fields["swaps"]
    assert first == {"to": "a", "why": "it is named first", "at": 1_000_000, "seconds": 2.0}
    assert (second["from"], second["to"], second["seconds"]) == ("a", "b", 3.0)
    assert len(second["why"]) == announced.WHY_CHARACTERS
    for _ in range(9):
        models.begin("a", "it has work")
        models.note_loaded("a", 1.0)
    assert len(models.fields["swaps"]) == MOST_SWAPS
    assert models.fields["loads"] == {
        "a": {"loaded": 10, "seconds": 11.04, "failed": 0},
        "b": {"loaded": 1, "seconds": 3.0, "failed": 0},
    }


def test_a_model_that_cannot_be_loaded_is_tried_again_less_and_less_often(clock: Clock) -> None:
    models = AnnouncedModels(QUEUES)
    pauses = []
    for tries in range(1, 8):
        models.begin("b", "2 requests wait")
        pauses.append(models.note_failed("b", "no such folder", 1.0))
        assert models.fields["unloadable"]["b"]["tries"] == tries
        assert not models.may_load("b")
        assert models.may_load("a")
        clock.now += pauses[-1]
        assert models.may_load("b")
    assert pauses == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S, 16 * RETRY_S,
                      LONGEST_RETRY_S, LONGEST_RETRY_S]  # fmt: skip
    assert models.fields["unloadable"]["b"]["why"] == "no such folder"
    assert models.fields["swaps"][-1]["failed"] is True
    assert models.fields["loads"]["b"] == {"loaded": 0, "seconds": 0.0, "failed": 7}


@pytest.mark.usefixtures("clock")
def test_a_model_that_was_loaded_has_no_failures() -> None:
    models = AnnouncedModels(QUEUES)
    models.begin("b", "")
    models.note_failed("b", "no memory", 1.0)
    models.begin("b", "again")
    models.note_loaded("b", 1.0)
    assert models.fields["unloadable"] == {}
    assert models.may_load("b")
    assert models.note_failed("b", "no memory", 1.0) == RETRY_S


def test_engines_that_cannot_sleep_are_announced() -> None:
    models = AnnouncedModels(QUEUES)
    models.note_sleep({"a": "", "b": "its answer is another one than before"})
    assert models.fields["sleep_failed"] == {"b": "its answer is another one than before"}


@pytest.mark.usefixtures("clock")
def test_an_engine_that_dies_later_is_no_swap() -> None:
    models = AnnouncedModels(QUEUES)
    models.begin("a", "")
    models.note_loaded("a", 1.0)
    models.note_failed("a", "the engine could not be rebuilt in 3 tries", 900.0)
    assert [swap.get("failed") for swap in models.fields["swaps"]] == [None]
    assert "a" in models.fields["unloadable"]


def test_the_adapters_of_all_models_are_announced() -> None:
    models = AnnouncedModels(QUEUES)
    models.note_adapters({"b": ["french"]})
    models.note_adapters({"a": ["sql"]})
    assert models.fields["model_adapters"] == {"a": ["sql"]}
