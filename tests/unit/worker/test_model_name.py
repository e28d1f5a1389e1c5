"""The name of a worker's model, which all that is shown and asked for has."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.redis.announcements import model_name
from worker.engine.openai import OpenAISettings
from worker.engine.vllm_settings import VllmSettings


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("models/tiny", "tiny"), ("models/tiny/", "tiny"), ("./models/tiny", "tiny"),
        ("models/../models/tiny", "tiny"), ("models/tiny/.", "tiny"), ("org/other", "org/other"),
        ("models/file", "models/file"), ("/", "/"),
    ],
)  # fmt: skip
def test_a_folder_is_named_by_its_last_part_and_a_hub_model_as_it_is(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert VllmSettings(model=model).model_name == name
    absolute = str(tmp_path / "models" / "tiny")
    assert VllmSettings(model=absolute).model_name == "tiny"


def test_a_servers_model_keeps_the_servers_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    settings = OpenAISettings(model="models/tiny", openai_base_urls="http://h:1/v1")
    assert settings.model_name == "models/tiny"


@pytest.mark.parametrize(
    ("announced", "name"),
    [
        ({"model": "models/tiny", "name": "tiny"}, "tiny"),
        ({"model": "/models/tiny"}, "tiny"),  # a worker of 0.2.0
        ({"model": "org/m"}, "org/m"),
        ({"model": None, "name": None}, ""),
        ({"name": 7, "model": ["x"]}, ""),
        ({}, ""),
    ],
)
def test_an_announcement_never_gives_a_folders_path_as_name(
    announced: dict[str, object], name: str
) -> None:
    assert model_name(announced) == name
