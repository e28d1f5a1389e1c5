"""What vLLM takes of a CPU's memory: computed before it starts, and chosen where nobody has.

Left alone vLLM wants 92 % of a NUMA node, as if it were a GPU that nothing else uses. Used for vLLM
on the CPU only: GPUs and NPUs start as vLLM has it.
"""

import logging
import math
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from worker.engine.vllm.kv_cache import CPU_VARIABLE, GIB, Cache, cache_of, size_of
from worker.engine.vllm.parallel import number
from worker.machine import devices, node_memory
from worker.machine.devices import folder_size
from worker.machine.finding import Finding
from worker.machine.packages import Packages

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
    nodes = node_memory.visible_nodes()
    apart = devices.binds_by_itself() and len(nodes) >= ranks
    nodes = nodes[:ranks] if apart else nodes
    free = min(node.free for node in nodes)
    limit = node_memory.own_limit()
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
