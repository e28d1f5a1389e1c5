"""Which settings of a vLLM engine make its answers other answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.engine.vllm.identity import engine_identity
from worker.engine.vllm_settings import EngineArgs, VllmSettings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def identity(model: Path | str, args: str = "", context: int = 100) -> str:
    settings = VllmSettings(_env_file=None, model=str(model), engine_args=EngineArgs(args))
    return engine_identity(settings, context)


def test_options_about_capacity_change_nothing(model: Path) -> None:
    assert identity(model, "--max-num-seqs 8 --gpu-memory-utilization 0.5") == identity(model)


@pytest.mark.parametrize(
    "args", ["--dtype float32", "--tool-call-parser hermes", "--quantization fp8", "--seed 3"]
)
def test_options_that_change_answers_do(model: Path, args: str) -> None:
    assert identity(model, args) != identity(model)


def test_a_chat_template_and_an_adapter_count_by_their_content(model: Path, tmp_path: Path) -> None:
    template, adapter = tmp_path / "chat.jinja", tmp_path / "poet"
    adapter.mkdir()
    found = set()
    for text in ("a", "b"):
        template.write_text(text)
        (adapter / "adapter_model.safetensors").write_text(text)
        found |= {
            identity(model, f"--chat-template {template}"),
            identity(model, f"--enable-lora --lora-modules poet={adapter}"),
        }
    assert len(found) == 4


def test_the_context_and_the_models_files_count(model: Path) -> None:
    before = identity(model)
    assert identity(model, context=200) != before
    (model / "config.json").write_text('{"a": 1}')
    assert identity(model) != before


def test_a_model_whose_files_are_not_here_has_no_identity() -> None:
    assert identity("nobody/no-such-model-anywhere") == ""


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_ATTENTION_BACKEND",
        "VLLM_USE_V1",
        "VLLM_BATCH_INVARIANT",
        "VLLM_USE_FLASHINFER_SAMPLER",
    ],
)
def test_variables_of_vllm_that_may_change_answers_count(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = identity(model)
    monkeypatch.setenv(name, "another value")
    assert identity(model) != before


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_LOGGING_LEVEL", "VLLM_LOG_STATS_INTERVAL", "VLLM_NO_USAGE_STATS", "VLLM_CACHE_ROOT",
        "VLLM_HOST_IP", "VLLM_PORT", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND", "CUDA_VISIBLE_DEVICES",
    ],
)  # fmt: skip
def test_variables_about_logs_caches_addresses_and_capacity_change_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = identity(model)
    monkeypatch.setenv(name, "another value")
    assert identity(model) == before


def test_each_value_of_an_option_counts(model: Path) -> None:
    values = ("--middleware a b", "--middleware c b", "--middleware c --middleware b")
    assert len({identity(model, args) for args in (*values, "--middleware b")}) >= 3
