"""Checks the size of vLLM's KV cache, and chooses it on the CPU.

The computation is right for models in which every layer keeps the keys and values of every token;
for other models only vLLM knows the size. On the CPU vLLM takes 92 % of a NUMA node's memory,
whatever other programs use. So on the CPU, a size is chosen here if no option sets it. On GPUs and
NPUs vLLM's defaults apply.
"""

import json
import logging
import math
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worker.machine import devices
from worker.machine.devices import folder_size
from worker.machine.finding import Finding
from worker.machine.packages import Packages

log = logging.getLogger(__name__)

#: Bytes of one GiB.
GIB = 2**30
#: vLLM's variable for the size of the KV cache on the CPU, in whole GiB; it overrides the option.
CPU_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
#: Model types that cache every token, as Llama does. Other types cache windows, latents or states.
PLAIN = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
#: Bytes of a number, by dtype. With `auto` a float32 model runs in 16 bits.
ITEM_BYTES = {"auto": 2, "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
#: Tokens of a KV block if --block-size is not set: on the CPU (vLLM 0.30), and on GPUs.
CPU_BLOCK, GPU_BLOCK = 128, 16
#: Factors of vLLM's size suffixes: 4k is 4,000, and 4K is 4,096.
UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
#: Bytes added for vLLM's rounding of GiB, and for the block that vLLM reserves.
MARGIN_BYTES = 64 * 2**20
#: Options for the engine's part of the memory, and for the size of the KV cache.
SHARE_OPTION, SIZE_OPTION = "gpu-memory-utilization", "kv-cache-memory-bytes"
#: Options on which the chosen size depends.
OPTIONS = (
    SHARE_OPTION, SIZE_OPTION, "max-num-seqs", "max-model-len", "block-size", "dtype",
    "kv-cache-dtype", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size",
)  # fmt: skip
#: The KV cache gets this part of the memory that model and processes leave; other programs need the
#: rest.
SHARE = 0.6
#: Bytes that vLLM 0.30 takes without model and cache: for worker and EngineCore, and for each rank.
PROCESSES_BYTES, RANK_BYTES = int(0.9 * GIB), int(0.7 * GIB)
#: vLLM's default of --max-num-seqs on the CPU.
DEFAULT_SEQS = 128

#: Matches vLLM's error for a KV cache that is smaller than one request.
_TOO_SMALL = re.compile(
    r"max seq len \((?P<length>\d+)\), \((?P<needed>[\d.]+) GiB KV cache is needed.*?"
    r"memory \((?P<has>[\d.]+) GiB\)(?:.*?maximum model length is (?P<fits>\d+))?",
    re.DOTALL,
)
#: Matches vLLM's error for a part of the memory that is not free.
_RESERVE = re.compile(
    r"\((?P<free>[\d.]+)/(?P<all>[\d.]+) GiB\) on startup is less than desired "
    r"(?:GPU|CPU) memory utilization \((?P<share>[\d.]+)"
)


def size_of(text: str) -> int | None:
    """Read a number such as 4096, 4k, 4K or 1.5G as vLLM's parser does; None for `auto`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    return int(float(match[1]) * UNITS[match[2]]) if match else None


def read_config(model: str | None, name: str = "config.json") -> dict[str, Any]:
    """Return the content of a local model's JSON file; {} if it cannot be read."""
    try:
        content = json.loads((Path(model or "") / name).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def whole_number(options: Mapping[str, str], name: str, default: int = 1) -> int:
    """Return the whole number that an option has, or the default."""
    return int(options[name]) if options.get(name, "").isdecimal() else default


def gib(size: int) -> str:
    """Return a number of bytes in GiB, with two decimals."""
    return f"{size / GIB:.2f}"


@dataclass(frozen=True, slots=True)
class Cache:
    """A KV cache on one device. `size` is in bytes, `length` and `block` are in tokens."""

    size: int
    length: int
    block: int
    token_bytes: int

    def fits(self) -> int:
        """Return the most tokens of one request; vLLM reserves one block."""
        return max(0, self.size // (self.block * self.token_bytes) - 1) * self.block

    def needs(self, requests: int = 1) -> int:
        """Return the bytes for this number of requests of `length` tokens."""
        blocks = requests * math.ceil(self.length / self.block) + 1
        return blocks * self.block * self.token_bytes

    def requests(self) -> int:
        """Return the number of requests of `length` tokens that fit."""
        blocks = self.size // (self.block * self.token_bytes) - 1
        return max(0, blocks // math.ceil(self.length / self.block))


def cache_of(
    options: Mapping[str, str], model: str | None, on_cpu: bool, size: int
) -> Cache | None:
    """Return a model's KV cache of `size` bytes; None if its layout is not known."""
    config = read_config(model)
    if config.get("model_type") not in PLAIN or config.get("sliding_window"):
        return None
    try:
        token_bytes = _token_bytes(config, options)
        length = size_of(options.get("max-model-len", str(config["max_position_embeddings"])))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # vLLM will refuse this config.json
    block = size_of(options.get("block-size", "")) or (CPU_BLOCK if on_cpu else GPU_BLOCK)
    return Cache(size, length, block, token_bytes) if length and token_bytes > 0 else None


def _token_bytes(config: Mapping[str, Any], options: Mapping[str, str]) -> int:
    """Return the bytes of one token's keys and values on one device."""
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    shards = int(options.get("tensor-parallel-size") or 1)
    stages = int(options.get("pipeline-parallel-size") or 1)
    layers = math.ceil(int(config["num_hidden_layers"]) / stages)
    dtype = options.get("kv-cache-dtype", "auto")
    if dtype == "auto":
        dtype = options.get("dtype", "auto")
    item_bytes = 1 if dtype.startswith("fp8") else ITEM_BYTES[dtype]
    return layers * max(1, kv_heads // shards) * width * 2 * item_bytes


def check_cache(options: Mapping[str, str], model: str | None, on_cpu: bool) -> Iterator[Finding]:
    """Check that --kv-cache-memory-bytes is enough for one request of the full length."""
    size = size_of(options.get(SIZE_OPTION, ""))
    if not size or (on_cpu and os.environ.get(CPU_VARIABLE)):
        return
    cache = cache_of(options, model, on_cpu, size)
    if cache and cache.fits() < cache.length:
        shorter = f"--max-model-len {cache.fits()} or " if cache.fits() else ""
        yield Finding(
            f"WARMQ_ENGINE_ARGS: a request of {cache.length} tokens (--max-model-len, or the "
            f"model's own length) needs {cache.needs()} bytes of KV cache, and "
            f"--kv-cache-memory-bytes is {cache.size}",
            f"Write {shorter}--kv-cache-memory-bytes {cache.needs()}",
        )


def memory_remedy(error: str) -> str | None:
    """Return the remedy for a start that failed for lack of memory; None for other errors."""
    if match := _TOO_SMALL.search(error):
        size = int((float(match["needed"]) + 0.01) * GIB) + MARGIN_BYTES
        shorter = f"--max-model-len {match['fits']}, or " if match["fits"] else ""
        holds = f"{match['fits']} tokens" if match["fits"] else "no request"
        return (
            f"the KV cache has {match['has']} GiB and holds {holds}; --max-model-len is "
            f"{match['length']}. Write {shorter}--kv-cache-memory-bytes {size}, or a greater "
            "--gpu-memory-utilization if --kv-cache-memory-bytes is not given"
        )
    if "No available memory for the cache blocks" in error:
        return (
            "the model leaves nothing for the KV cache. Write a greater --gpu-memory-utilization, "
            "or spread the model: --tensor-parallel-size"
        )
    if match := _RESERVE.search(error):
        share = math.floor(float(match["free"]) / float(match["all"]) * 100) / 100
        return (
            f"only {match['free']} of {match['all']} GiB are free, and --gpu-memory-utilization "
            f"asks for {match['share']} of all. Write --gpu-memory-utilization {share:g}, or stop "
            "the process that uses the rest"
        )
    return None


# -- on the CPU ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen size of the KV cache.

    `size` is in bytes, or None if a token's bytes are not known. `share` is the part of the node's
    memory that the engine takes (0 to 1). `message` is for the log.
    """

    size: int | None
    share: float
    message: str


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of one engine process, in bytes.

    `total` and `free` are its NUMA node's. `usable` is the part that this process can use, since
    processes may share a node or a cgroup's limit. `for_cache` is what model and processes leave of
    it.
    """

    total: int
    free: int
    usable: int
    for_cache: int

    @property
    def taken(self) -> int:
        """The estimated bytes that model and processes take."""
        return self.usable - self.for_cache

    def __str__(self) -> str:
        return f"{gib(self.free)} of {gib(self.total)} GiB are free on the engine's NUMA node"


def runs_on_cpu(packages: Packages) -> bool:
    """Whether the installed vLLM runs on the CPU, without the RBLN plugin."""
    return packages.on_cpu and not packages.rbln


def is_configured(options: Mapping[str, str]) -> bool:
    """Whether the user has set the engine's memory, by an option or a variable."""
    by_option = options.keys() & {SHARE_OPTION, SIZE_OPTION, "config"}
    return bool(by_option or os.environ.get(CPU_VARIABLE))


def budget_of(options: Mapping[str, str], model: str | None) -> Budget:
    """Measure this machine's memory. Processes on one node share its free memory."""
    dimensions = ("tensor", "pipeline", "data")
    ranks = math.prod(
        whole_number(options, f"{dimension}-parallel-size") for dimension in dimensions
    )
    nodes = devices.visible_nodes()
    one_node_each = devices.vllm_binds_cores() and len(nodes) >= ranks
    nodes = nodes[:ranks] if one_node_each else nodes
    free = min(node.free for node in nodes)
    limit = devices.own_limit()
    usable = min(
        free if one_node_each else free // ranks, free if limit is None else limit // ranks
    )
    folder = Path(model or "")
    weights = folder_size(folder) if model and folder.is_dir() else 0
    for_cache = usable - (weights + PROCESSES_BYTES) // ranks - RANK_BYTES
    return Budget(max(1, min(node.total for node in nodes)), free, usable, for_cache)


def choose(options: Mapping[str, str], model: str | None) -> Choice:
    """Choose the engine's memory, for users who set no memory option."""
    budget = budget_of(options, model)
    reason = f"no memory option is given and {budget}"
    cache = cache_of(options, model, on_cpu=True, size=max(0, int(budget.for_cache * SHARE)))
    if cache is None:
        share = max(0.01, math.floor(SHARE * budget.usable / budget.total * 100) / 100)
        message = f"the engine may take {share:g} of all, as with --{SHARE_OPTION} {share:g}"
        return Choice(None, share, f"{reason}: {message}")
    seqs = size_of(options.get("max-num-seqs", "")) or DEFAULT_SEQS
    one_request = min(cache.needs(), max(0, budget.for_cache))
    size = min(max(cache.size, one_request), cache.needs(seqs))
    message = (
        f"the KV cache gets {gib(size)} GiB, for {replace(cache, size=size).requests()} requests "
        f"of {cache.length} tokens, as with --{SIZE_OPTION} {size}"
    )
    return Choice(size, min(1.0, size / budget.total), f"{reason}: {message}")


def fill_in(args: Namespace, packages: Packages) -> None:
    """Set vLLM's memory options on the CPU if the user has set none."""
    values = {name: getattr(args, name.replace("-", "_")) for name in OPTIONS}
    options = {name: str(value) for name, value in values.items() if value is not None}
    if runs_on_cpu(packages) and not is_configured(options):
        choice = choose(options, args.model)
        args.kv_cache_memory_bytes, args.gpu_memory_utilization = choice.size, choice.share
        log.warning("%s", choice.message, extra={"action": "memory_chosen"})


def check_memory(
    options: Mapping[str, str], model: str | None, packages: Packages
) -> Iterator[Finding]:
    """Check that the memory that vLLM will ask for on the CPU is free."""
    if not runs_on_cpu(packages) or "config" in options:
        return  # only vLLM's parser reads the options in that file
    budget = budget_of(options, model)
    if not is_configured(options):
        cache = cache_of(options, model, on_cpu=True, size=int(budget.for_cache * SHARE))
        if cache and cache.needs() > budget.for_cache:
            yield _request_too_large(cache, budget)
    elif size := configured_size(options):
        if size > budget.for_cache:
            yield Finding(
                f"a KV cache of {gib(size)} GiB (--{SIZE_OPTION} or {CPU_VARIABLE}), and {budget}; "
                f"the model and vLLM take about {gib(budget.taken)}",
                f"Name at most {max(1, int(budget.for_cache * SHARE))} bytes, or free memory",
                fatal=size > budget.free,
            )
    elif text := os.environ.get(CPU_VARIABLE):
        yield Finding(
            f"{CPU_VARIABLE}={text} is not a number of GiB", "Write a whole number, for example 4"
        )
    else:
        share = _share(options)
        size = math.ceil(budget.total * share)
        if size > budget.free - PROCESSES_BYTES and share:
            yield Finding(
                f"--{SHARE_OPTION} {share:g} asks for {gib(size)} GiB of this CPU's memory, and "
                f"{budget}; vLLM's own start takes {gib(PROCESSES_BYTES)} of them first",
                f"Leave --{SHARE_OPTION} out, so that the worker chooses, or free memory",
                fatal=size > budget.free,
            )


def _request_too_large(cache: Cache, budget: Budget) -> Finding:
    shorter = f"Write --max-model-len {cache.fits()}, or free memory"
    remedy = shorter if cache.fits() else "Free memory, or use a smaller model"
    return Finding(
        f"a request of {cache.length} tokens needs {gib(cache.needs())} GiB of KV cache, the model "
        f"and vLLM about {gib(budget.taken)}, and {budget}",
        f"{remedy}; --{SIZE_OPTION} overrides this estimate",
    )


def describe(options: Mapping[str, str], model: str | None) -> str:
    """Describe the memory that vLLM will ask for on the CPU."""
    if "config" in options:
        return "as vLLM's --config file sets it"
    if not is_configured(options):
        return choose(options, model).message
    budget = budget_of(options, model)
    if size := configured_size(options):
        return f"{gib(size)} GiB as asked for; {budget}"
    taken = math.ceil(budget.total * _share(options))
    for_cache = max(0, taken - budget.taken)
    return (
        f"about {gib(for_cache)} GiB, the part of {gib(taken)} that model and vLLM leave; {budget}"
    )


def configured_size(options: Mapping[str, str]) -> int | None:
    """Return the bytes that the user has set for the KV cache, or None."""
    if text := os.environ.get(CPU_VARIABLE):
        return int(text) * GIB if text.isdecimal() else None
    return size_of(options.get(SIZE_OPTION, ""))


def _share(options: Mapping[str, str]) -> float:
    """Return the configured part of the node's memory; 0 if vLLM's parser will refuse it."""
    try:
        share = float(options.get(SHARE_OPTION, ""))
    except ValueError:
        return 0
    return share if 0 < share <= 1 else 0
