"""Names of adapters lead to folders in WARMQ_ADAPTERS, and to nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contract.errors import RequestRejected
from worker.engine.vllm.adapter_folder import (
    CONFIG_BYTES,
    MOST_NAMES,
    NAME_CHARACTERS,
    AdapterFolder,
    check_adapter,
)


def adapter(folder: Path, rank: object = 8) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").touch()
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with the adapter `french`, beside an adapter outside of it."""
    adapter(tmp_path / "outside")
    adapter(tmp_path / "adapters" / "french")
    return tmp_path / "adapters"


@pytest.mark.parametrize(
    "name",
    [
        "../outside", "..", ".", "", "/", "french/", "/etc", "french/../french", "a/b", ".hidden",
        "french\0", "french\n", "\x7f", "..\\outside", "fr\u202eench", "\ud800", "x" * 201,
        "語" * 200, "x" * 100_000, "~", "%2e%2e", "adapter_config.json", "frensh",
    ],
)  # fmt: skip
def test_a_wrong_name_is_the_error_of_its_request(root: Path, name: str) -> None:
    (root / "adapter_config.json").touch()  # a file is no adapter
    with pytest.raises(RequestRejected) as raised:
        AdapterFolder(str(root)).find(name, ["french"])
    error = raised.value
    assert (error.code, error.field) == ("model_not_found", "body.model")
    assert "WARMQ_ADAPTERS" in error.message or "adapter" in error.message
    assert len(error.message) < 500 and error.message.isprintable()


def test_a_misspelt_name_is_told_with_the_known_ones(root: Path) -> None:
    with pytest.raises(RequestRejected, match=r"there are: french; did you mean french\?"):
        AdapterFolder(str(root)).find("frensh", ["french"])


def test_a_link_leads_to_another_adapter_but_not_out(root: Path) -> None:
    (root / "inside").symlink_to("french")
    (root / "out").symlink_to(root.parent / "outside")
    (root / "itself").symlink_to(".")
    (root / "circle").symlink_to("circle")
    adapter(root / "part")
    (root / "part" / "adapter_model.safetensors").unlink()
    (root / "part" / "adapter_model.safetensors").symlink_to(
        root.parent / "outside" / "adapter_model.safetensors"
    )
    folder = AdapterFolder(str(root))
    assert folder.find("inside") == root / "inside"
    for name in ("out", "itself", "part"):
        with pytest.raises(RequestRejected, match="leads out of WARMQ_ADAPTERS"):
            folder.find(name)
    with pytest.raises(RequestRejected):
        folder.find("circle")
    assert folder.names() == ["french", "inside"]


def test_a_folder_that_is_a_link_has_adapters(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    folder = AdapterFolder(str(root.parent / "link"))
    assert folder.names() == ["french"]
    assert folder.find("french") == root / "french"


def test_names_are_those_of_adapters_and_bounded(root: Path) -> None:
    (root / "notes").mkdir()
    (root / "README").touch()
    adapter(root / "x y")
    adapter(root / "line\nfeed")
    adapter(root / ("z" * (NAME_CHARACTERS + 1)))
    folder = AdapterFolder(str(root))
    assert folder.names() == ["french", "x y"]
    for number in range(MOST_NAMES):
        adapter(root / f"a{number:04}")
    assert len(folder.names()) == MOST_NAMES


def told(folder: Path, most: int = 16) -> str:
    found = check_adapter(folder, most)
    return f"{found.problem} {found.remedy}" if found else ""


@pytest.mark.parametrize(
    "config",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b'{"r": "8"}', b'{"r": 0}', b'{"r": true}',
     b'{"r": 8.5}', b"[" * 100_000, b'{"r": 8}' + b" " * CONFIG_BYTES],
)  # fmt: skip
def test_a_bad_configuration_is_told_with_its_file(root: Path, config: bytes) -> None:
    (root / "french" / "adapter_config.json").write_bytes(config)
    text = told(root / "french")
    assert str(root / "french" / "adapter_config.json") in text
    assert "save_pretrained" in text


def test_what_else_prevents_a_load_is_told_with_its_remedy(root: Path) -> None:
    assert told(root / "french", 8) == ""
    assert "rank 24" in told(adapter(root / "deep", 24)) and "--max-lora-rank 32" in told(
        root / "deep"
    )
    assert "smaller rank" in told(adapter(root / "deepest", 4096))
    (root / "french" / "adapter_model.safetensors").unlink()
    assert "no weights" in told(root / "french")
    (root / "french" / "adapter_config.json").unlink()
    assert "adapter_config.json does not exist" in told(root / "french")


def test_the_stamp_changes_with_the_files(root: Path) -> None:
    folder = AdapterFolder(str(root))
    before = folder.stamp("french")
    assert folder.stamp("french") == before
    (root / "french" / "adapter_model.safetensors").write_bytes(b"x")
    assert folder.stamp("french") != before
    assert folder.stamp("nowhere") == ()
