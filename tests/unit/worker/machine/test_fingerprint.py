"""Which changes of a model's files its fingerprint sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.machine import fingerprint as module
from worker.machine.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "README.md").write_text("hello")
    return tmp_path


def test_the_same_files_in_another_place_have_the_same(folder: Path, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("other")
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert fingerprint(other) == fingerprint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja"])
def test_another_text_or_other_weights_change_it(folder: Path, name: str) -> None:
    before = fingerprint(folder)
    (folder / name).write_bytes(b'{"a": 2}')
    assert fingerprint(folder) != before


@pytest.mark.parametrize("name", ["README.md", ".gitattributes", ".cache"])
def test_what_changes_no_answer_does_not(folder: Path, name: str) -> None:
    before = fingerprint(folder)
    (folder / name).write_text("other")
    assert fingerprint(folder) == before


def test_large_weights_are_sampled_from_end_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 4096)
    monkeypatch.setattr(module, "BLOCK", 64)
    file = folder / "model.safetensors"
    weights = bytearray(file.read_bytes())
    found = {fingerprint(folder)}
    for at in (0, len(weights) - 1):
        changed = bytearray(weights)
        changed[at] ^= 1
        file.write_bytes(changed)
        found.add(fingerprint(folder))
    assert len(found) == 3


def test_a_file_has_one_too(folder: Path) -> None:
    assert fingerprint(folder / "config.json") != fingerprint(folder / "README.md")
