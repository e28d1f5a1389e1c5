"""The memory of vLLM's KV cache: whether it holds one request, and how much of a CPU's it gets.

By arithmetic before anything is loaded, for models whose every layer keeps the keys and values of
every token; from vLLM's own error where only the engine knows. On the CPU vLLM wants 92 % of a NUMA
node, as if it were a GPU that nothing else uses: there the amount is chosen, if nobody has chosen
it. GPUs and NPUs start as vLLM has it.
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


def number(asked: Mapping[str, str], name: str, default: int = 1) -> int:
    """Return an option's whole number, or the default."""
    return int(asked[name]) if asked.get(name, "").isdecimal() else default


# -- on the CPU ----------------------------------------------------------------------


log = logging.getLogger(__name__)

SHARE_OPTION, SIZE_OPTION = "gpu-memory-utilization", "kv-cache-memory-bytes"
#: Options by which the choice is made, by long name; `asked` may hold others too.
OPTIONS = (
    SHARE_OPTION, SIZE_OPTION, "max-num-seqs", "max-model-len", "block-size", "dtype",
    "kv-cache-dtype", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size",
)  # fmt: skip
#: Of what is free after model and processes, the part that the KV cache may have: others live
#: on this machine too, and it is not known what they will want.
SHARE = 0.6
#: What vLLM 0.30's processes took without model and cache: worker and engine core, each rank.
PROCESSES_BYTES, RANK_BYTES = int(0.9 * GIB), int(0.7 * GIB)
#: vLLM's own number of requests at once on a CPU, where no option says it.
DEFAULT_SEQS = 128


@dataclass(frozen=True, slots=True)
class Choice:
    """The KV cache's `size` in bytes, None where the need of a token is not known; the `share` of
    the node's memory (0 to 1) that the engine may take; and a sentence for the log."""

    size: int | None
    share: float
    told: str


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for one engine process: of its NUMA node in all and free; `each` is its part where
    several share the node or a limit, `rest` what model and processes leave of that part."""

    total: int
    free: int
    each: int
    rest: int

    @property
    def taken(self) -> int:
        """What model and processes take, about."""
        return self.each - self.rest

    def __str__(self) -> str:
        return f"{gib(self.free)} of {gib(self.total)} GiB are free on its NUMA node"


def applies(packages: Packages) -> bool:
    """Whether the vLLM that is installed runs on the CPU, and no plugin takes its place."""
    return packages.on_cpu and not packages.rbln


def chosen_already(asked: Mapping[str, str]) -> bool:
    """Whether the user has said how much memory the engine may have."""
    by_option = asked.keys() & {SHARE_OPTION, SIZE_OPTION, "config"}
    return bool(by_option or os.environ.get(CPU_VARIABLE))


def room(asked: Mapping[str, str], model: str | None) -> Room:
    """Look at this machine; processes that share a node share what is free."""
    kinds = ("tensor", "pipeline", "data")
    ranks = math.prod(number(asked, f"{kind}-parallel-size") for kind in kinds)
    nodes = devices.visible_nodes()
    apart = devices.binds_by_itself() and len(nodes) >= ranks
    nodes = nodes[:ranks] if apart else nodes
    free = min(node.free for node in nodes)
    limit = devices.own_limit()
    each = min(free if apart else free // ranks, free if limit is None else limit // ranks)
    folder = Path(model or "")
    weights = folder_size(folder) if model and folder.is_dir() else 0
    rest = each - (weights + PROCESSES_BYTES) // ranks - RANK_BYTES
    return Room(max(1, min(node.total for node in nodes)), free, each, rest)


def choose(asked: Mapping[str, str], model: str | None) -> Choice:
    """Return how much the engine gets where the options leave it open."""
    here = room(asked, model)
    given = f"no memory option is given and {here}"
    cache = cache_of(asked, model, on_cpu=True, size=max(0, int(here.rest * SHARE)))
    if cache is None:
        share = max(0.01, math.floor(SHARE * here.each / here.total * 100) / 100)
        told = f"{given}: the engine may take {share:g} of all, as with --{SHARE_OPTION} {share:g}"
        return Choice(None, share, told)
    seqs = size_of(asked.get("max-num-seqs", "")) or DEFAULT_SEQS
    one = min(cache.needs(), max(0, here.rest))
    size = min(max(cache.size, one), cache.needs(seqs))
    held = replace(cache, size=size).requests()
    told = (
        f"{given}: the KV cache gets {gib(size)} GiB, for {held} requests of {cache.length} "
        f"tokens, as with --{SIZE_OPTION} {size}"
    )
    return Choice(size, min(1.0, size / here.total), told)


def fill_in(args: Namespace, packages: Packages) -> None:
    """Write the options that nobody gave; vLLM's own are made for a GPU that is all its own."""
    given = {name: getattr(args, name.replace("-", "_")) for name in OPTIONS}
    asked = {name: str(value) for name, value in given.items() if value is not None}
    if applies(packages) and not chosen_already(asked):
        choice = choose(asked, args.model)
        args.kv_cache_memory_bytes, args.gpu_memory_utilization = choice.size, choice.share
        log.warning("%s", choice.told, extra={"action": "memory_chosen"})


def judge_memory(
    asked: Mapping[str, str], model: str | None, packages: Packages
) -> Iterator[Finding]:
    """Say if vLLM on the CPU will not find the memory that it is going to ask for."""
    if not applies(packages) or "config" in asked:
        return  # what a file of options says only vLLM's parser knows
    here = room(asked, model)
    if not chosen_already(asked):
        yield from _judge_choice(cache_of(asked, model, True, int(here.rest * SHARE)), here)
    elif wanted := asked_size(asked):
        yield from _judge_size(wanted, here)
    elif text := os.environ.get(CPU_VARIABLE):
        yield Finding(f"{CPU_VARIABLE}={text} is no number of GiB", "Write it as 4")
    elif share := _share(asked):
        yield from _judge_share(share, here)


def describe(asked: Mapping[str, str], model: str | None) -> str:
    """Say what vLLM on the CPU will ask for."""
    if "config" in asked:
        return "what vLLM's --config file says"
    if not chosen_already(asked):
        return choose(asked, model).told
    here = room(asked, model)
    if wanted := asked_size(asked):
        return f"{gib(wanted)} GiB as asked for; {here}"
    taken = math.ceil(here.total * _share(asked))
    rest = max(0, taken - here.taken)
    return f"about {gib(rest)} GiB, the part of {gib(taken)} that model and vLLM leave; {here}"


def asked_size(asked: Mapping[str, str]) -> int | None:
    """Return the KV cache's size in bytes if the user has named it; vLLM's variable wins."""
    if text := os.environ.get(CPU_VARIABLE):
        return int(text) * GIB if text.isdecimal() else None
    return size_of(asked.get(SIZE_OPTION, ""))


def gib(size: int) -> str:
    """Return bytes as GiB with two decimals."""
    return f"{size / GIB:.2f}"


def _judge_choice(cache: Cache | None, here: Room) -> Iterator[Finding]:
    if cache is None or cache.needs() <= here.rest:
        return
    shorter = f"Write --max-model-len {cache.fits()}, or free memory"
    remedy = shorter if cache.fits() else "Free memory, or use a smaller model"
    yield Finding(
        f"a request of {cache.length} tokens needs {gib(cache.needs())} GiB of KV cache, the model "
        f"and vLLM about {gib(here.taken)}, and {here}",
        f"{remedy}; --{SIZE_OPTION} overrides this estimate",
    )


def _judge_size(wanted: int, here: Room) -> Iterator[Finding]:
    if wanted > here.rest:
        yield Finding(
            f"a KV cache of {gib(wanted)} GiB (--{SIZE_OPTION} or {CPU_VARIABLE}), and {here}; the "
            f"model and vLLM take about {gib(here.taken)}",
            f"Name at most {max(1, int(here.rest * SHARE))} bytes, or free memory",
            fatal=wanted > here.free,
        )


def _judge_share(share: float, here: Room) -> Iterator[Finding]:
    wanted = math.ceil(here.total * share)
    if wanted > here.free - PROCESSES_BYTES:
        yield Finding(
            f"--{SHARE_OPTION} {share:g} asks for {gib(wanted)} GiB of this CPU's memory, and "
            f"{here}; vLLM's own start takes {gib(PROCESSES_BYTES)} of them first",
            f"Leave --{SHARE_OPTION} out, and the worker chooses; or free memory",
            fatal=wanted > here.free,
        )


def _share(asked: Mapping[str, str]) -> float:
    """Return the share of the node; 0 where vLLM's parser will refuse it."""
    try:
        share = float(asked.get(SHARE_OPTION, ""))
    except ValueError:
        return 0
    return share if 0 < share <= 1 else 0
