"""A model that is not there is told in one sentence, before a library looks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from contract.settings import SettingsError
from demo.stack import MODEL
from worker.engine.catalogue import load_settings, make_engine
from worker.machine.model_folder import TOKENIZERS, check_model


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Run in an empty folder; HF_HUB_OFFLINE is set, and nothing was downloaded."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield monkeypatch


def told(model: Path | str, **options: bool) -> str:
    """Return what is said of a model, '' if nothing is wrong."""
    return " | ".join(map(str, check_model(str(model), **options)))


def folder(path: Path, config: str | None = "{}", name: str = "config.json") -> Path:
    path.mkdir(parents=True)
    if config is not None:
        (path / name).write_text(config)
    return path


def test_a_model_that_can_be_used_is_no_finding(tmp_path: Path) -> None:
    assert told(MODEL) == ""
    assert told(folder(tmp_path / "mistral", name="params.json")) == ""
    assert told("s3://bucket/model") == ""
    (tmp_path / "model.gguf").touch()
    assert told(tmp_path / "model.gguf") == ""


def test_a_name_that_may_be_the_hubs_is_told_to_need_the_network_only_if_it_is_cut_off(
    offline: pytest.MonkeyPatch,
) -> None:
    assert told("models/nope") == (
        "WARMQ_MODEL: there is no folder models/nope, and no model of that name can be downloaded "
        "while HF_HUB_OFFLINE is set. Name the folder of a model in WARMQ_MODEL; for a model's "
        "name on the hub set HF_HUB_OFFLINE=0."
    )
    offline.setattr(constants, "HF_HUB_OFFLINE", False)
    assert told("models/nope") == ""


@pytest.mark.parametrize("model", ["/models/nope", "./nope", "../nope", "a/b/c", "a b"])
def test_a_path_is_no_name_of_the_hub(model: str) -> None:
    assert told(model).startswith(f"WARMQ_MODEL: there is no folder {model}. Name the folder of")


def test_the_nearest_folder_is_named(tmp_path: Path) -> None:
    folder(tmp_path / "models" / "tiny")
    assert "Name models/tiny, if" in told("models/tyni")
    assert f"Name {tmp_path}/models/tiny, if" in told(f"{tmp_path}/models/tinny")


def test_a_home_is_not_written_out() -> None:
    assert "Write the full path" in told("~/models/tiny")


def test_a_file_and_folders_that_are_no_models_are_told(tmp_path: Path) -> None:
    file = folder(tmp_path / "tiny") / "config.json"
    assert told(file) == (
        f"WARMQ_MODEL: {file} is a file, not a folder. Name the folder that the file is in: "
        f"WARMQ_MODEL={file.parent}."
    )
    assert told(folder(tmp_path / "empty", None)).startswith(
        f"WARMQ_MODEL: {tmp_path}/empty has no config.json. Name the folder of a model"
    )
    assert told(tmp_path).endswith(f"has no config.json. Name the folder inside: {file.parent}.")
    adapter = folder(tmp_path / "lora", name="adapter_config.json")
    assert "has no config.json, only an adapter" in told(adapter) and "--lora-modules" in told(
        adapter
    )


@pytest.mark.parametrize("config", ["{", "[]", "\x00", "[" * 100_000])
def test_a_config_that_cannot_be_read_is_told(tmp_path: Path, config: str) -> None:
    path = folder(tmp_path / "m", config)
    assert told(path).startswith(f"WARMQ_MODEL: {path}/config.json cannot be read: ")


def test_a_name_that_is_too_long_is_told() -> None:
    assert "cannot be read: File name too long" in told("/" + "x" * 5000)


def test_a_tokenizers_folder_needs_no_config(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", name="tokenizer.json")
    assert told(path) != ""
    assert [*check_model(str(path), holds=TOKENIZERS)] == []


def test_a_model_that_was_downloaded_is_used_whatever_the_network(tmp_path: Path) -> None:
    snapshot = tmp_path / "cache" / "models--org--m" / "snapshots" / "abc"
    folder(snapshot)
    refs = tmp_path / "cache" / "models--org--m" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert told("org/m", ask_hub=True) == ""


def without_response(kind: type[Exception]) -> Exception:
    """Return an error of the hub's library, whichever HTTP library made its response."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, ""),
        (without_response(RepositoryNotFoundError), "no public model of that name"),
        (without_response(GatedRepoError), "needs its owner's consent"),
        (RuntimeError("Name or service not known"), "cannot be asked for a model of that"),
    ],
)
def test_the_start_asks_the_hub_once(
    offline: pytest.MonkeyPatch, answer: Exception | None, words: str
) -> None:
    asked: list[str] = []

    def model_info(_: object, name: str, timeout: float) -> None:
        asked.append(name)
        if answer is not None:
            raise answer

    offline.setattr(constants, "HF_HUB_OFFLINE", False)
    offline.setattr(huggingface_hub.HfApi, "model_info", model_info)
    found = told("org/m", ask_hub=True)
    assert asked == ["org/m"]
    assert words in found and bool(found) == bool(words)


@pytest.mark.parametrize("engine", ["vllm", "triton"])
def test_the_start_refuses_it_at_once(engine: str) -> None:
    settings = load_settings(engine=engine, model="models/nope", _env_file=None)
    with pytest.raises(SettingsError, match="there is no folder models/nope") as caught:
        made = make_engine(settings)
        made.build()
    assert "\n" not in caught.value.message


def test_options_that_name_the_configuration_leave_it_to_vllm(tmp_path: Path) -> None:
    from worker.engine.vllm.preflight import check_folder

    path = str(folder(tmp_path / "m", None))
    assert [*check_folder(load_settings(engine="vllm", model=path))]
    more = {"engine_args": f"--hf-config-path {json.dumps(str(MODEL))}"}
    assert not [*check_folder(load_settings(engine="vllm", model=path, **more))]
