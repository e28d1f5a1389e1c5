"""Where the engine of each model is between its stays."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from worker.drain.keeper import EngineKeeper
from worker.engine.catalogue import load_settings
from worker.engine.simulated import ENGINE
from worker.engine.spec import Sleep
from worker.models.asleep import Asleep
from worker.models.config import Model, models_of
from worker.models.residence import choose, with_residences

GIB = 2**30


def models(*names: str, loaded_with: str | None = None, **settings: Any) -> dict[str, Model]:
    """Return models without fields, the last one with `with`."""
    entries: dict[str, dict[str, str]] = {name: {} for name in names}
    if loaded_with:
        entries[names[-1]]["with"] = loaded_with
    text = json.dumps(entries)
    return models_of(load_settings(engine="simulated", models=text, **settings))


def sleep(weights: float) -> Sleep:
    return Sleep(load_settings(engine="simulated"), int(weights * GIB), GIB, "planned")


def test_the_first_models_get_the_memory() -> None:
    found = choose({"a": sleep(30), "b": sleep(60), "c": sleep(40), "d": "no sleep"}, 100 * GIB)
    assert [bool(each.sleep) for each in found.values()] == [True, False, True, False]
    assert "60.0 GiB" in found["b"].why and "80.0 GiB may be used" in found["b"].why
    assert "70.0 of 80.0 GiB" in found["c"].why
    assert "no sleep" in str(found["d"]) and "stopped" in str(found["d"])
    assert isinstance(found["a"].keeper("a"), Asleep)
    assert type(found["d"].keeper("d")) is EngineKeeper


def test_an_engine_that_cannot_sleep_is_stopped() -> None:
    given = models("a", "b")
    changed, found = with_residences(given)
    assert changed == given and not any(each.sleep for each in found.values())


def test_the_only_model_has_nothing_to_sleep_for() -> None:
    tests = json.dumps({"sleep": "well"})
    assert with_residences(models("a", simulated_tests=tests))[1]["a"].sleep is None
    assert with_residences(models("a", "b", simulated_tests=tests))[1]["a"].sleep is not None


def test_models_are_loaded_together_where_the_engine_finds_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = models("a", "b", "c", loaded_with="a", simulated_tests=json.dumps({"sleep": "well"}))
    found = with_residences(given)[1]
    assert found["c"].loaded_with == "a" and "together with a" in str(found["c"])
    # Sleep frees memory that is read for the whole device, so none of the two sleeps.
    assert found["a"].sleep is None and "together with c" in found["a"].why
    assert found["b"].sleep is not None

    spec = replace(ENGINE, together=lambda settings: (False, f"{len(settings)} are too many"))
    monkeypatch.setattr("worker.models.residence.find_engine", lambda name: spec)
    found = with_residences(given)[1]
    assert found["c"].loaded_with is None and found["c"].why.startswith("2 are too many")
    assert found["a"].sleep is not None and found["c"].sleep is not None
