"""`python -m worker.triton`: what it writes for GPU and RBLN, and what it finds in old files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kit.engines.compiled_folder import compiled

from demo.stack import MODEL, ROOT
from worker.engine.triton.rules import (
    STALE,
    check_arguments,
    check_repository,
    engine_arguments,
    parameters_of,
)
from worker.machine.finding import Finding
from worker.tools.triton import command, main

#: Of the vendor's tutorial for Llama3-8B, vllm-rbln 0.8 and older.
TUTORIAL = {
    "model": "/models/rbln-Llama-3-8B-Instruct", "max_num_seqs": 4, "max_num_batched_tokens": 8192,
    "max_model_len": 8192, "block_size": 8192, "device": "rbln",
}  # fmt: skip


def written(repository: Path, name: str = "vllm_model") -> tuple[dict[str, Any], str]:
    """Return model.json and config.pbtxt."""
    folder = repository / name
    arguments = json.loads((folder / "1" / "model.json").read_text())
    return arguments, (folder / "config.pbtxt").read_text()


def by_hand(repository: Path, arguments: object, config: str = 'backend: "vllm"\n') -> Path:
    """Write a repository as a person would."""
    version = repository / "old" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.json").write_text(json.dumps(arguments))
    (version.parent / "config.pbtxt").write_text(config)
    return repository


def fatal(found: list[Finding]) -> list[str]:
    return [str(one) for one in found if one.fatal]


def test_a_gpu_model_gets_the_keys_that_workers_need_to_know(tmp_path: Path) -> None:
    words = [str(MODEL), "-o", str(tmp_path), "--model-path", "/models/llama", "--name", "llama"]
    assert main([*words, "--max-model-len", "4096", "--set", "tensor-parallel-size=2"]) == 0
    arguments, config = written(tmp_path, "llama")
    assert arguments == {
        "model": "/models/llama", "max_num_seqs": 256, "max_model_len": 4096,
        "tensor_parallel_size": 2,
    }  # fmt: skip
    assert 'name: "llama"' in config and 'backend: "vllm"' in config and "KIND_MODEL" in config
    assert parameters_of(config) == {
        "ENABLE_VLLM_HEALTH_CHECK": "true", "WARMQ_MAX_NUM_SEQS": "256",
        "WARMQ_MAX_MODEL_LEN": "4096",
    }  # fmt: skip
    assert list(check_repository(tmp_path)) == []


def test_a_compiled_model_gets_its_folder_alone_and_its_limits_are_told(tmp_path: Path) -> None:
    model = compiled(tmp_path / "model", "b4_eager")
    assert main([str(model), "-o", str(tmp_path / "repo")]) == 0
    arguments, config = written(tmp_path / "repo")
    assert arguments == {"model": str(model)}
    assert parameters_of(config)["WARMQ_MAX_NUM_SEQS"] == "4"
    assert parameters_of(config)["WARMQ_MAX_MODEL_LEN"] == "512"
    assert list(check_repository(tmp_path / "repo")) == []


def test_limits_that_a_compiled_model_has_not_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = compiled(tmp_path / "model", "b4_eager")
    assert main([str(model), "-o", str(tmp_path / "repo"), "--max-num-seqs", "8"]) == 2
    assert "compiled for 4 requests at once of 512 tokens" in capsys.readouterr().err
    assert not (tmp_path / "repo").exists()


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    words = [str(MODEL), "-o", str(tmp_path)]
    assert [main(words), main(words), main([*words, "--overwrite"])] == [0, 2, 0]


def test_every_stale_key_of_the_tutorial_is_named_with_its_replacement(tmp_path: Path) -> None:
    found = fatal(list(check_repository(by_hand(tmp_path, TUTORIAL))))
    assert [text.split(": ", 1)[1].split(" ")[0] for text in found] == [
        '"device"', '"max_num_batched_tokens"', '"block_size"',
    ]  # fmt: skip
    assert "the platform is found by itself" in found[0]
    assert all("Leave it out" in text for text in found)


def test_a_compiled_folder_that_can_be_read_is_compared_with_model_json(tmp_path: Path) -> None:
    model = compiled(tmp_path / "model", "b4_eager")
    asked = {"model": str(model), "max_num_batched_tokens": 512, "max_num_seqs": 8,
             "device": "rbln", "tensor_parallel_size": 4}  # fmt: skip
    found = list(check_arguments(asked))
    assert any("compiled prefill chunk of 128 tokens" in text for text in fatal(found))
    assert any("python -m worker.compile --num-devices" in text for text in fatal(found))
    notes = [str(one) for one in found if not one.fatal]
    assert notes == [
        'model.json: "max_num_seqs" 8 has no effect: the compiled batch size is 4. Leave it out, '
        "or recompile with --batch-size 8."
    ]


@pytest.mark.parametrize("name", sorted(STALE))
def test_a_stale_key_is_none_of_the_installed_vllm_and_has_a_replacement(name: str) -> None:
    known = engine_arguments()
    assert len(known) > 100
    assert name not in known
    (found,) = [one for one in check_arguments({"model": "m", name: 1}) if name in one.problem]
    assert found.fatal and found.remedy
    for word in found.remedy.split('"')[1::2]:
        if "_" in word and word != "num_speculative_tokens":
            assert word in known, f"{name}: {word}"


def test_a_slip_of_the_pen_is_met_with_the_nearest_name() -> None:
    (found,) = check_arguments({"model": "m", "max_num_seq": 4})
    assert 'no engine argument "max_num_seq"' in found.problem
    assert found.remedy == 'Write "max_num_seqs"'


@pytest.mark.parametrize(
    ("arguments", "config", "said"),
    [
        ({"model": "m"}, 'backend: "python"', "the backend is python, not vllm"),
        ({}, 'backend: "vllm"', "names no model"),
        ([], 'backend: "vllm"', "is not a JSON object"),
        ({"model": "m"}, 'name: "new"\nbackend: "vllm"', "the name new is not the folder's"),
        (
            {"model": "m"},
            'backend: "vllm"\nmodel_transaction_policy { decoupled: False }',
            "decoupled is false",
        ),
        (
            {"model": "m", "tensor_parallel_size": 2},
            'backend: "vllm"\ninstance_group [ { kind: KIND_GPU } ]',
            "KIND_GPU is for one GPU, but the arguments ask for 2",
        ),
        (
            {"model": "m", "max_num_seqs": 8},
            'backend: "vllm"\nparameters { key: "WARMQ_MAX_NUM_SEQS" value { string_value: "4" } }',
            "WARMQ_MAX_NUM_SEQS is 4; model.json has 8",
        ),
        ({"model": "m", "enable_lora": "true"}, 'backend: "vllm"', "enable_lora without"),
    ],
)
def test_a_repository_that_would_not_serve_is_a_problem(
    tmp_path: Path, arguments: object, config: str, said: str
) -> None:
    (found,) = fatal(list(check_repository(by_hand(tmp_path, arguments, config))))
    assert said in found


def test_the_page_shows_files_that_are_judged_as_it_says() -> None:
    page = (ROOT / "docs/reference/engine-triton.md").read_text()
    shown = [json.loads(text) for text in re.findall(r'`(\{"model".*?\})`', page)]
    judged = [
        [one.problem.split('"')[1] for one in check_arguments(arguments)] for arguments in shown
    ]
    stale = ["max_num_batched_tokens", "block_size", "device"]
    assert [sorted(names) for names in judged] == [["disable_log_requests"], [], sorted(stale), []]
    (words,) = re.findall(r"python -m worker\.triton (/.*)", page)
    assert command.make_context("triton", words.split()).params["name"] == "vllm_model"


def test_the_command_tells_problems_by_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check", str(by_hand(tmp_path, TUTORIAL))]) == 1
    assert 'problem: old/1/model.json: "device" is refused on RBLN' in capsys.readouterr().out
    assert main(["--check", str(by_hand(tmp_path, {"model": "/m"}))]) == 0
    assert main(["--check", str(tmp_path / "nothing")]) == 1
    for wrong in (["-o", str(tmp_path)], [str(MODEL), "-o", str(tmp_path), "--set", "a"]):
        assert main(wrong) == 2
