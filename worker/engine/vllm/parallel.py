"""How many devices the options ask for, and how many there are."""

import os
from collections.abc import Iterator, Mapping

from worker.engine.vllm_settings import VllmSettings
from worker.machine import devices
from worker.machine.finding import Finding

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


def number(asked: Mapping[str, str], name: str, default: int = 1) -> int:
    """Return an option's whole number, or the default."""
    return int(asked[name]) if asked.get(name, "").isdecimal() else default


def default_front_ends(settings: VllmSettings) -> int:
    """Return how many processes should feed an engine: one for each data-parallel replica.

    One carries 1,000 requests a second that go the full way and 2,200 plain ones on cores that are
    not fast (docs/performance.md), which is what a GPU answers of the shortest. Each takes a core,
    and the engine's own processes need theirs.
    """
    asked = settings.engine_args.options
    if asked.get("data-parallel-backend") in ELSEWHERE or "nnodes" in asked:
        return 1
    replicas = number(asked, "data-parallel-size-local", number(asked, "data-parallel-size"))
    return max(1, min(replicas, len(os.sched_getaffinity(0)) // CORES_EACH))
