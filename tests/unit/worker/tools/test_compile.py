"""What `python -m worker.compile` refuses before hours are spent, and what it hands on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from demo.stack import MODEL
from worker.machine.packages import Packages
from worker.tools import compile as compile_module
from worker.tools.compile import Plan, check_plan, command, describe, main

SDK = {"optimum-rbln": "0.12.0", "vllm-rbln": "0.12.0", "rebel-compiler": "0.12.0"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131_072}


def judged(
    tmp_path: Path,
    versions: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    rebel: bool = True,
    **plan: Any,
) -> list[tuple[bool, str]]:
    """Return (fatal, text) of what is found about a plan."""
    full = {"model": "m", "output": tmp_path / "out", "batch_size": 4, "max_seq_len": 4096} | plan
    packages = Packages(SDK if versions is None else versions, rebel)
    return [(f.fatal, str(f)) for f in check_plan(Plan(**full), packages, config or LLAMA)]


def parse(words: str) -> Plan:
    """Return the plan that a command line asks for."""
    return Plan(**command.make_context("compile", words.split()).params)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"max_seq_len": 32_768},
        {"max_seq_len": 131_072, "flash": True},
        {"max_seq_len": 8192, "partition_len": 4096, "npu": "RBLN-CR03"},
        {"buckets": (4, 2, 1), "prefill_chunk": 256, "num_devices": 4},
    ],
)
def test_legal_plans(tmp_path: Path, plan: dict[str, Any]) -> None:
    assert judged(tmp_path, **plan) == []


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"max_seq_len": 32_769}, "Add --flash --partition-len 16384"),
        ({"max_seq_len": 16_385, "npu": "RBLN-CR13"}, "exceeds REBEL's 16384"),
        ({"partition_len": 512}, "outside 1024 to 32768"),
        ({"partition_len": 32_768, "npu": "RBLN-CR03"}, "outside 1024 to 16384"),
        ({"max_seq_len": 6000, "partition_len": 4096}, "Use --max-seq-len 8192"),
        ({"max_seq_len": 4096, "partition_len": 4096}, "Use --max-seq-len 8192"),
        ({"prefill_chunk": 100}, "not a multiple of 64"),
        ({"npu": "H200"}, "not a known card"),
        ({"buckets": (8, 4)}, "not the batch size 4"),
        ({"config": {"architectures": ["MambaForCausalLM"]}}, "MambaForCausalLM is not served"),
        ({"config": LLAMA | {"max_position_embeddings": 2048}}, "the model's 2048 positions"),
        ({"versions": {}}, "optimum-rbln is not installed"),
        ({"versions": SDK | {"rebel-compiler": "0.11.2"}}, "rebel-compiler 0.11.2"),
        ({"versions": {"optimum-rbln": "0.12.0", "rebel-compiler": "0.11.2"}}, "different release"),
        ({"versions": {"optimum-rbln": "0.12.0"}, "rebel": False},
         "rebel-compiler==0.12.* (needs an account"),
    ],
)  # fmt: skip
def test_refused_plans(tmp_path: Path, plan: dict[str, Any], words: str) -> None:
    assert any(fatal and words in text for fatal, text in judged(tmp_path, **plan))


def test_no_space_and_a_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((fatal, text),) = judged(tmp_path, output=tmp_path)
    assert fatal and "--overwrite" in text
    monkeypatch.setattr("worker.tools.compile.folder_size", lambda folder: 2**60)
    ((fatal, text),) = judged(tmp_path, model=str(MODEL))
    assert fatal and "GiB free" in text


def test_batch_size_one_and_emulation_are_told(tmp_path: Path) -> None:
    ((fatal, text),) = judged(tmp_path, batch_size=1)
    assert not fatal and "one request at a time" in text
    ((fatal, text),) = judged(tmp_path, {"optimum-rbln": "0.12.0", "vllm-rbln": "0.12.0"})
    assert not fatal and "emulated" in text


def test_the_command_line_becomes_optimums_arguments() -> None:
    plan = parse(
        "m -o d --batch-size 8 --max-seq-len 8192 --num-devices 4 --buckets 1,8,4 "
        "--partition-len 4096 --kv-blocks 9 --prefill-chunk 256 --npu RBLN-CA25"
    )
    assert plan.rbln_config() == {
        "batch_size": 8, "max_seq_len": 8192, "num_devices": 4, "decoder_batch_sizes": [8, 4, 1],
        "attn_impl": "flash_attn", "kvcache_partition_len": 4096, "kvcache_num_blocks": 9,
        "prefill_chunk_size": 256, "npu": "RBLN-CA25", "create_runtimes": False,
    }  # fmt: skip
    assert parse("m -o d --max-seq-len 512").rbln_config() == {
        "batch_size": 4, "max_seq_len": 512, "create_runtimes": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("m -o d", "'--max-seq-len'"),
        ("m -o d --max-seq-len 0", "0 is not in the range x>=1"),
        ("-o d --max-seq-len 9", "'MODEL'"),
        ("m -o d --max-seq-len 9 --buckets 4,0", "whole numbers from 1"),
        ("m -o d --max-seq-len 9 --buckets 4;2", "whole numbers from 1"),
        ("m -o d --max-seq-len 9 --dtype int8", "'int8' is not one of"),
    ],
)
def test_wrong_command_lines(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert told in capsys.readouterr().err


def test_without_the_vendors_packages_it_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(MODEL), "-o", str(tmp_path / "d"), "--max-seq-len", "4096"]) == 2
    said = capsys.readouterr().err
    assert "optimum-rbln is not installed" in said and "the model's 2048 positions" in said


def test_a_compiler_that_fails_leaves_nothing_and_one_that_works_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "installed", lambda: Packages(SDK, rebel=True))
    argv = [str(MODEL), "-o", str(tmp_path / "d"), "--max-seq-len", "512"]

    def broken(plan: Plan, folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(compile_module, "compile_into", broken)
    assert main(argv) == 1 and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(compile_module, "compile_into", lambda plan, folder: folder.mkdir())
    assert main(argv) == 0
    manifest = json.loads((tmp_path / "d" / "warmq_compile.json").read_text())
    assert manifest["rbln_config"]["max_seq_len"] == 512 and manifest["versions"] == SDK
    assert manifest["emulated"] is False and len(manifest["source_config_sha256"]) == 64
    assert main(argv) == 2, "the folder exists now"
    assert main([*argv, "--overwrite"]) == 0


def test_the_manifest_names_the_hubs_revision(tmp_path: Path) -> None:
    plan = parse("org/model -o d --max-seq-len 512")
    assert describe(plan, SDK, True, {"_commit_hash": "abc"})["source_revision"] == "abc"
