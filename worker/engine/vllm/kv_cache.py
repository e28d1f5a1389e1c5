"""Whether the KV cache holds one request of the greatest length, and what to write if not.

By arithmetic before anything is loaded, for models whose every layer keeps the keys and values of
every token; from vLLM's own error where only the engine knows.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.machine.finding import Finding

GIB = 2**30
#: vLLM's variable for the KV cache on the CPU, in whole GiB; it wins over the option.
CPU_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
#: Llama's way of caching. What other models keep (windows, latents, states) only vLLM knows.
PLAIN = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
#: By dtype. A model in float32 is run in 16 bits too, unless --dtype says float32.
ITEM_BYTES = {"auto": 2, "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
#: Tokens a block unless --block-size says otherwise: vLLM 0.30 on the CPU, and on GPUs.
CPU_BLOCK, GPU_BLOCK = 128, 16
#: How vLLM's parser reads sizes: 4k is 4,000 and 4K is 4,096.
UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
#: vLLM's rounded GiB, upwards, and a block that it keeps for itself.
MARGIN_BYTES = 64 * 2**20

_TOO_SMALL = re.compile(
    r"max seq len \((?P<asked>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed.*?"
    r"memory \((?P<has>[\d.]+) GiB\)(?:.*?maximum model length is (?P<fits>\d+))?",
    re.DOTALL,
)
_RESERVE = re.compile(
    r"\((?P<free>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than desired "
    r"(?:GPU|CPU) memory utilization \((?P<share>[\d.]+)"
)


def size_of(text: str) -> int | None:
    """Return the number that a value of vLLM's options means: `4096`, `4k`, `4K` or `1.5G`.

    None for `auto`, and for whatever vLLM's parser will refuse.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    return int(float(found[1]) * UNITS[found[2]]) if found else None


@dataclass(frozen=True, slots=True)
class Cache:
    """A KV cache as asked for: all sizes in bytes on one device, lengths in tokens."""

    size: int
    length: int
    block: int
    token_bytes: int

    def fits(self) -> int:
        """Return the greatest length; vLLM keeps one block for itself."""
        return max(0, self.size // (self.block * self.token_bytes) - 1) * self.block

    def needs(self, requests: int = 1) -> int:
        """Return the size that holds so many requests of `length`."""
        blocks = requests * math.ceil(self.length / self.block) + 1
        return blocks * self.block * self.token_bytes

    def requests(self) -> int:
        """Return how many requests of `length` it holds."""
        blocks = self.size // (self.block * self.token_bytes) - 1
        return max(0, blocks // math.ceil(self.length / self.block))


def cache_of(asked: Mapping[str, str], model: str | None, on_cpu: bool, size: int) -> Cache | None:
    """Return a cache of `size` bytes for this model; None where its form cannot be told."""
    config = read_config(model)
    if config.get("model_type") not in PLAIN or config.get("sliding_window"):
        return None
    try:
        token_bytes = _token_bytes(config, asked)
        length = size_of(asked.get("max-model-len", str(config["max_position_embeddings"])))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # vLLM says what is wrong with that config.json
    block = size_of(asked.get("block-size", "")) or (CPU_BLOCK if on_cpu else GPU_BLOCK)
    return Cache(size, length, block, token_bytes) if length and token_bytes > 0 else None


def _token_bytes(config: Mapping[str, Any], asked: Mapping[str, str]) -> int:
    """Return what one token takes on one device: keys and values of its layers and heads."""
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    shards = int(asked.get("tensor-parallel-size") or 1)
    stages = int(asked.get("pipeline-parallel-size") or 1)
    layers = math.ceil(int(config["num_hidden_layers"]) / stages)
    return layers * max(1, kv_heads // shards) * width * 2 * _item_bytes(config, asked)


def _item_bytes(config: Mapping[str, Any], asked: Mapping[str, str]) -> int:
    cached_as = asked.get("kv-cache-dtype", "auto")
    if cached_as.startswith("fp8"):
        return 1
    name = cached_as if cached_as != "auto" else asked.get("dtype", "auto")
    return ITEM_BYTES[name]


def judge_cache(asked: Mapping[str, str], model: str | None, on_cpu: bool) -> Iterator[Finding]:
    """Say if --kv-cache-memory-bytes cannot hold one request of the greatest length."""
    size = size_of(asked.get("kv-cache-memory-bytes", ""))
    if not size or (on_cpu and os.environ.get(CPU_VARIABLE)):
        return
    cache = cache_of(asked, model, on_cpu, size)
    if cache and cache.fits() < cache.length:
        shorter = f"--max-model-len {cache.fits()} or " if cache.fits() else ""
        yield Finding(
            f"WARMQ_ENGINE_ARGS: a request of {cache.length} tokens (--max-model-len, or the "
            f"model's own length) needs {cache.needs()} bytes of KV cache, and "
            f"--kv-cache-memory-bytes is {cache.size}",
            f"Write {shorter}--kv-cache-memory-bytes {cache.needs()}",
        )


def explain(error: str) -> str | None:
    """Return what to do about a start that failed for want of memory; None for other errors."""
    if found := _TOO_SMALL.search(error):
        size = int((float(found["needed"]) + 0.01) * GIB) + MARGIN_BYTES
        shorter = f"--max-model-len {found['fits']}, or " if found["fits"] else ""
        holds = f"{found['fits']} tokens" if found["fits"] else "no request"
        return (
            f"the KV cache has {found['has']} GiB and holds {holds}; --max-model-len is "
            f"{found['asked']}. Write {shorter}--kv-cache-memory-bytes {size}, or a greater "
            "--gpu-memory-utilization if --kv-cache-memory-bytes is not given"
        )
    if "No available memory for the cache blocks" in error:
        return (
            "the model leaves nothing for the KV cache. Write a greater --gpu-memory-utilization, "
            "or spread the model: --tensor-parallel-size"
        )
    if found := _RESERVE.search(error):
        share = math.floor(float(found["free"]) / float(found["all"]) * 100) / 100
        return (
            f"only {found['free']} of {found['all']} GiB are free, and --gpu-memory-utilization "
            f"asks for {found['share']} of all. Write --gpu-memory-utilization {share:g}, or end "
            "what holds the rest"
        )
    return None


def read_config(model: str | None, name: str = "config.json") -> dict[str, Any]:
    """Return a JSON file of a local model, {} where it cannot be read."""
    try:
        found = json.loads((Path(model or "") / name).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
