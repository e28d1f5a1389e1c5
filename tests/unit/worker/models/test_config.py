"""WARMQ_MODELS: what is read, and what is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contract.settings import SettingsError
from worker.engine.catalogue import load_settings
from worker.models.config import ASSUMED_SWAP_S, MOST_MODELS, Model, models_of


def read(models: object, **settings: Any) -> dict[str, Model]:
    text = models if isinstance(models, str) else json.dumps(models)
    return models_of(load_settings(engine="simulated", models=text, **settings))


def test_a_toml_file_and_json_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\npath = "/m/a"\nmin_stay = "90s"\n[models.b]\nmax_wait = "1h"\n')
    entries = {"a": {"path": "/m/a", "min_stay": "90s"}, "b": {"max_wait": "1h"}}
    for found in (read(str(file)), read(entries), read({"models": entries})):
        assert list(found) == ["a", "b"]
        assert found["a"].settings.model == "/m/a"
        assert found["a"].settings.queue_to_drain == "warmq.a"
        assert found["a"].terms(2.0).min_stay_s == 90
        assert found["b"].terms(None).max_wait_s == 3600
        assert found["b"].terms(None).min_stay_s == 20 * ASSUMED_SWAP_S
        assert found["b"].settings.models is None


def test_without_the_setting_there_is_one_model() -> None:
    assert models_of(load_settings(engine="simulated")) == {}


@pytest.mark.parametrize(("models", "texts"), [
    ("missing.toml", ["missing.toml", "cannot be read"]),
    ("{", ["WARMQ_MODELS"]),
    ({}, ["names no model"]),
    ({"models": {}}, ["names no model"]),
    ({"a": {"min_stey": "1s"}}, ["'a'", "min_stey", "did you mean min_stay"]),
    ({"a": {"min_stay": "soon"}}, ["'a'", "min_stay", "duration"]),
    ({"a": {"min_stay": -1}}, ["'a'", "min_stay"]),
    ({"a": 3}, ["'a'"]),
    ({"a": {"with": "c"}, "b": {}}, ["'a'", "with", "'c'", "name one of b"]),
    ({"a": {"with": "a"}}, ["'a'", "with", "no other model; remove it"]),
    ({"a": {"with": "b"}, "b": {"with": "a"}}, ["'a'", "with", "remove one of the two"]),
    ({"a": {"with": "b"}, "b": {"with": "c"}, "c": {}}, ["'a'", 'write with = "c"']),
    ({"a": {"wiht": "b"}, "b": {}}, ["'a'", "wiht", "did you mean with"]),
    ({"models": {"a": {}}, "model": 1}, ["'model'"]),
    ({f"m{n}": {} for n in range(MOST_MODELS + 1)}, [str(MOST_MODELS)]),
    ({"a\n": {}}, ["printable"]),
    ({"a": {"adapters": "/l"}}, ["'a'", "adapters", "the engine simulated has none"]),
    ({"a": {"adapters": ["/l"]}}, ["'a'", "adapters"]),
])  # fmt: skip
def test_what_is_refused(models: object, texts: list[str]) -> None:
    with pytest.raises(SettingsError) as refused:
        read(models)
    for text in texts:
        assert text in str(refused.value)


@pytest.mark.parametrize("name", ["model", "served_model_name", "front_ends"])
def test_settings_of_one_model_are_refused_beside_it(name: str) -> None:
    with pytest.raises(SettingsError, match=f"WARMQ_MODELS.*WARMQ_{name.upper()}"):
        read({"a": {}}, **{name: 2 if name == "front_ends" else "x"})


def test_each_model_has_its_own_adapters() -> None:
    models = {"a": {"path": "/m/a", "adapters": "/l/a"}, "b": {"path": "/m/b"}}
    found = models_of(load_settings(engine="vllm", models=json.dumps(models)))
    assert [getattr(found[name].settings, "adapters") for name in "ab"] == ["/l/a", None]  # noqa: B009
    with pytest.raises(SettingsError, match=r"WARMQ_MODELS.*WARMQ_ADAPTERS"):
        load_settings(engine="vllm", models=json.dumps(models), adapters="/l")
