"""Plans vLLM's sleep mode, in which an engine frees its GPU and keeps its processes.

Asleep (level 1) the weights are in the machine's memory, and the KV cache is dropped. vLLM has this
mode on NVIDIA's and AMD's GPUs; here it is used where NVML shows the GPUs' memory.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from contract.openai.body import COMPLETION_URL
from contract.openai.pooling import EMBEDDINGS_URL, SCORE_URLS
from worker.engine.spec import Sleep
from worker.engine.vllm.memory import GIB, PROCESSES_BYTES, RANK_BYTES, SHARE_OPTION, whole_number
from worker.engine.vllm_settings import EngineArgs, VllmSettings
from worker.machine import devices
from worker.machine.devices import folder_size
from worker.machine.gpu_memory import gpu_memories
from worker.machine.packages import installed

#: Most bytes that a sleeping engine has on each of its GPUs (measured: 1.7 GB on an H100).
ASLEEP_BYTES = int(2.5 * GIB)
#: The greatest --gpu-memory-utilization that is chosen here; vLLM's own default is 0.92.
GREATEST_SHARE = 0.9
#: The least chosen --gpu-memory-utilization: below it, sleeping engines take too much of the GPU.
LEAST_SHARE = 0.5
#: The body of the question that an engine is asked after its start and after each wake, by url.
QUESTIONS: Mapping[str, dict[str, Any]] = {
    COMPLETION_URL: {"prompt": "1 2 3 4 5 6", "max_tokens": 16, "temperature": 0,
                     "ignore_eos": True},
    EMBEDDINGS_URL: {"input": "1 2 3 4 5 6"},
    SCORE_URLS[0]: {"text_1": "1 2 3", "text_2": "4 5 6"},
}  # fmt: skip
#: The part of a CPU machine's free memory that weights and processes of engines may take together,
#: and the greatest sum of --gpu-memory-utilization on a GPU.
TOGETHER_SHARE, GREATEST_TOGETHER = 0.6, 0.95
#: Decimals of a number in an answer that must be the same each time.
DIGITS = 3


def plan(settings: VllmSettings, more: int) -> Sleep | str:
    """Return how this model can sleep with `more` models, or the reason why it cannot."""
    packages, options = installed(), settings.engine_args.options
    if packages.rbln:
        return "vLLM's RBLN plugin has no sleep mode"
    if packages.on_cpu:
        return "vLLM has no sleep mode on the CPU"
    if "no-enable-sleep-mode" in options:
        return "its options have --no-enable-sleep-mode"
    if "config" in options:
        return "its options name a --config file, which only vLLM reads"
    if not (cards := gpu_memories()):
        return "the memory of its device cannot be read: NVML shows no NVIDIA GPU"
    if not (weights := weights_of(settings.model)):
        return f"the size of its weights is not known: {settings.model} is not a folder with them"
    total = min(card.total for card in cards)
    return _plan_on(total, weights, settings, more)


def _plan_on(total: int, weights: int, settings: VllmSettings, more: int) -> Sleep | str:
    """Plan for GPUs with `total` bytes each."""
    args, asleep = settings.engine_args, more * ASLEEP_BYTES
    greatest = math.floor((1 - asleep / total) * 100) / 100
    set_share = args.options.get(SHARE_OPTION)
    try:
        share = min(GREATEST_SHARE, greatest) if set_share is None else float(set_share)
    except ValueError:
        return f"vLLM will refuse --{SHARE_OPTION} {set_share}"
    if share > greatest:
        return (
            f"--{SHARE_OPTION} {share:g} of {_gib(total)} GiB does not leave {_gib(asleep)} GiB "
            f"for {more} sleeping models, at most {greatest:g} does"
        )
    if set_share is None and share < LEAST_SHARE:
        return (
            f"{more} sleeping models take up to {_gib(asleep)} of {_gib(total)} GiB of the GPU, "
            f"which leaves less than {LEAST_SHARE:g} for this one "
            f"(set --{SHARE_OPTION} to accept less)"
        )
    text = f"{args} --enable-sleep-mode" + (f" --{SHARE_OPTION} {share:g}" if not set_share else "")
    cards = math.prod(
        whole_number(args.options, f"{kind}-parallel-size")
        for kind in ("tensor", "pipeline", "data")
    )
    return Sleep(
        settings.model_copy(update={"engine_args": EngineArgs(text.strip())}),
        weights,
        cards * ASLEEP_BYTES,
        f"awake it has up to {_gib(int(share * total))} of {_gib(total)} GiB of its GPU, "
        f"asleep at most {_gib(ASLEEP_BYTES)}; "
        f"its weights take {_gib(weights)} GiB of the machine's memory",
    )


def together(settings: Sequence[VllmSettings]) -> tuple[bool, str]:
    """Return whether the engines of these models fit at the same time, with the arithmetic."""
    packages = installed()
    if packages.rbln:
        return False, "vLLM's RBLN plugin has one engine for each device"
    if packages.on_cpu:
        needs = sum(weights_of(each.model) + PROCESSES_BYTES + RANK_BYTES for each in settings)
        room = int(devices.machine().free * TOGETHER_SHARE)
        verb = "fit into" if needs <= room else "do not fit into"
        return needs <= room, (
            f"{len(settings)} engines with {_gib(needs)} GiB of weights and processes {verb} "
            f"{_gib(room)} GiB of the free memory; the KV caches get the rest"
        )
    set_shares = [each.engine_args.options.get(SHARE_OPTION, "") for each in settings]
    try:
        shares = [float(text) for text in set_shares]
    except ValueError:
        return False, f"each of these models needs its part of the GPU: --{SHARE_OPTION}"
    sum_of = " + ".join(f"{share:g}" for share in shares)
    fits = sum(shares) <= GREATEST_TOGETHER
    return fits, (
        f"--{SHARE_OPTION} {sum_of} of the GPU is {'at most' if fits else 'more than'} "
        f"{GREATEST_TOGETHER:g}"
    )


def weights_of(model: str | None) -> int:
    """Return the bytes of a folder's weights; 0 if there is no such folder."""
    folder = Path(model or "")
    if not model or not folder.is_dir():
        return 0
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return sum(sizes) or folder_size(folder)


def answer_of(body: bytes) -> str:
    """Return the part of an answer to a question that is the same each time."""
    answer = orjson.loads(body)
    first = (answer.get("choices") or answer["data"])[0]
    if "text" in first:
        return str(first["text"])
    value = first.get("embedding", first.get("score"))
    numbers = value if isinstance(value, list) else [value]
    return json.dumps([round(float(number), DIGITS) for number in numbers])


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
