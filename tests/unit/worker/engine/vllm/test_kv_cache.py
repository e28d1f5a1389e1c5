"""The KV cache's arithmetic, and vLLM's errors about it turned into settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.stack import MODEL
from worker.engine.vllm.memory import GIB, cache_of, explain, judge_cache, size_of

#: The shipped model: 5 layers x 2 key/value heads x 64 x keys and values x 4 bytes.
TOKEN_BYTES = 5 * 2 * 64 * 2 * 4
LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "max_position_embeddings": 131072,
}  # fmt: skip


def written(folder: Path, **config: object) -> str:
    """Write a config.json and return its folder."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | config))
    return str(folder)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("1G", GIB), ("2g", 2 * 10**9),
     ("auto", None), ("", None), ("-1", None), ("4 K", None)],
)  # fmt: skip
def test_sizes_are_read_as_vllm_reads_them(text: str, size: int | None) -> None:
    assert size_of(text) == size


def test_the_shipped_models_cache_is_computed_from_its_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 9 blocks of 128 tokens: one is vLLM's own, 8 hold 1,024 tokens.
    size = 9 * 128 * TOKEN_BYTES
    asked = {"kv-cache-memory-bytes": str(size), "dtype": "float32"}
    cache = cache_of(asked | {"max-model-len": "1024"}, str(MODEL), on_cpu=True, size=size)
    assert cache is not None
    assert (cache.token_bytes, cache.fits(), cache.needs()) == (
        TOKEN_BYTES, 1024, 9 * 128 * TOKEN_BYTES,
    )  # fmt: skip
    assert list(judge_cache(asked | {"max-model-len": "1024"}, str(MODEL), True)) == []
    (finding,) = judge_cache(asked | {"max-model-len": "1025"}, str(MODEL), True)
    assert finding.fatal
    needs = 10 * 128 * TOKEN_BYTES
    assert finding.remedy == f"Write --max-model-len 1024 or --kv-cache-memory-bytes {needs}"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM takes it before the option
    assert list(judge_cache(asked | {"max-model-len": "1025"}, str(MODEL), True)) == []


@pytest.mark.parametrize(
    ("args", "token_bytes"),
    [
        ({}, 32 * 8 * 128 * 2 * 2),  # 128 KiB, as every guide to Llama 3 8B says
        ({"tensor-parallel-size": "4"}, 32 * 2 * 128 * 2 * 2),
        ({"tensor-parallel-size": "16"}, 32 * 1 * 128 * 2 * 2),  # heads are copied, not split
        ({"pipeline-parallel-size": "3"}, 11 * 8 * 128 * 2 * 2),
        ({"kv-cache-dtype": "fp8_e5m2"}, 32 * 8 * 128 * 2),
        ({"dtype": "float32"}, 32 * 8 * 128 * 2 * 4),
    ],
)
def test_a_tokens_size_on_one_device(
    tmp_path: Path, args: dict[str, str], token_bytes: int
) -> None:
    cache = cache_of(args, written(tmp_path), on_cpu=False, size=GIB)
    assert cache is not None
    assert (cache.token_bytes, cache.length, cache.block) == (token_bytes, 131072, 16)


def test_models_that_cache_otherwise_are_left_to_vllm(tmp_path: Path) -> None:
    asked = {"kv-cache-memory-bytes": "1M"}
    for config in ({"model_type": "deepseek_v3"}, {"sliding_window": 4096},
                   {"num_attention_heads": None}, {"max_position_embeddings": []}):  # fmt: skip
        assert list(judge_cache(asked, written(tmp_path, **config), False)) == []
    for model in ("some/hub-name", None):
        assert list(judge_cache(asked, model, False)) == []
    assert list(judge_cache({}, str(MODEL), False)) == []


TOO_SMALL = (
    "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB "
    "KV cache is needed, which is larger than the available KV cache memory (7.12 GiB). Based on "
    "the available memory, the estimated maximum model length is 58304. Try increasing"
)


def test_vllms_errors_about_memory_become_settings() -> None:
    told = explain(TOO_SMALL)
    assert told is not None
    assert "Write --max-model-len 58304, or --kv-cache-memory-bytes 17257715466" in told
    assert "holds no request" in str(explain(TOO_SMALL.replace("Based on", "").replace(
        "the available memory, the estimated maximum model length is 58304.", "")))  # fmt: skip
    assert "greater --gpu-memory-utilization" in str(
        explain("No available memory for the cache blocks. Try")
    )
    told = explain(
        "Free memory on device cuda:0 (31.22/79.1 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 72.77 GiB)."
    )
    assert "--gpu-memory-utilization 0.39" in str(told)
    assert explain("RuntimeError: anything else") is None
