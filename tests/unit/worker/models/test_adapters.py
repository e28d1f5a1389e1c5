"""The adapters of models that are not loaded: read from their files, and offered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.engine.catalogue import load_settings
from worker.models import adapters
from worker.models.adapters import MOST_NAMES, ModelAdapters
from worker.models.config import models_of


def adapter(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "adapter_config.json").write_text("{}")
    return str(folder)


def looks(models: dict[str, dict[str, str]]) -> ModelAdapters:
    return ModelAdapters(models_of(load_settings(engine="vllm", models=json.dumps(models))))


def test_adapters_are_those_of_the_folder_and_of_the_options(tmp_path: Path) -> None:
    found = looks({
        "chat": {"path": "/m/chat", "adapters": adapter(tmp_path / "chat", "french", "sql")},
        "judge": {"path": "/m/judge", "engine_args": "--lora-modules strict=/adapters/strict"},
        "plain": {"path": "/m/plain"},
    }).look()  # fmt: skip
    assert found == {"chat": ["french", "sql"], "judge": ["strict"]}


def test_folders_are_read_again_after_some_seconds_and_errors_are_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "chat"
    on = looks({"chat": {"path": "/m/chat", "adapters": str(folder)}, "b": {"path": "/m/b"}})
    assert on.look() == {}
    assert on.look() is None
    monkeypatch.setattr(adapters, "LOOK_EVERY_S", 0.0)
    assert on.look() == {}
    assert [record.action for record in caplog.records] == ["adapters_gone"]  # type: ignore[attr-defined]
    adapter(folder, "french")
    assert on.look() == {"chat": ["french"]}


def test_a_limited_number_of_names_is_announced(tmp_path: Path) -> None:
    names = [f"a{n:03}" for n in range(300)]
    folder = adapter(tmp_path / "f", *names)
    found = looks({m: {"path": f"/m/{m}", "adapters": folder} for m in ("a", "b", "c")}).look()
    assert found is not None
    assert [len(each) for each in found.values()] == [300, MOST_NAMES - 300]
