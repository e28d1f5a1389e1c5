"""What is to be compiled, and what can be found wrong with it before the compiler runs for hours.

Limits are optimum-rbln 0.12's (modeling_attention_utils.py, vllm-rbln's registry.py).
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.engine.rbln.rules import INSTALL, judge_packages
from worker.machine.devices import folder_size
from worker.machine.finding import Finding
from worker.machine.packages import Packages

#: Text models that vllm-rbln 0.12 serves when they were compiled.
ARCHITECTURES = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Llama", "Gemma", "Gemma2", "Phi", "Midm", "Mistral", "Exaone", "Qwen2", "OPT", "Qwen3",
        "Qwen3Moe", "GptOss",
    )
) | {"GPT2LMHeadModel", "MidmLMHeadModel"}  # fmt: skip
MIN_PARTITION = 1024
CHUNK_MULTIPLE = 64
#: Space for the compiled files, as a multiple of the weights: an estimate.
SPACE_FACTOR = 2.0
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Family:
    """Limits of a family of cards, in tokens."""

    name: str
    max_eager: int
    max_partition: int
    default_partition: int


#: By how the names of their cards begin; the first where none is named, as the compiler does.
FAMILIES = {
    "RBLN-CA": Family("ATOM", 32_768, 32_768, 16_384),
    "RBLN-CR": Family("REBEL", 16_384, 16_384, 8_192),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One compilation. Lengths in tokens; None leaves the choice to optimum-rbln."""

    model: str
    output: Path
    batch_size: int
    max_seq_len: int
    num_devices: int = 1
    buckets: tuple[int, ...] = ()
    flash: bool = False
    partition_len: int | None = None
    kv_blocks: int | None = None
    prefill_chunk: int | None = None
    npu: str | None = None
    dtype: str | None = None
    overwrite: bool = False

    def rbln_config(self) -> dict[str, Any]:
        """Return the arguments as optimum-rbln names them; no NPU is needed to compile."""
        given = {
            "batch_size": self.batch_size,
            "max_seq_len": self.max_seq_len,
            "num_devices": self.num_devices if self.num_devices > 1 else None,
            "decoder_batch_sizes": list(self.buckets) or None,
            "attn_impl": "flash_attn" if self.uses_flash else None,
            "kvcache_partition_len": self.partition_len,
            "kvcache_num_blocks": self.kv_blocks,
            "prefill_chunk_size": self.prefill_chunk,
            "npu": self.npu,
        }
        return {k: v for k, v in given.items() if v is not None} | {"create_runtimes": False}

    @property
    def uses_flash(self) -> bool:
        """Whether the context is cut into partitions."""
        return self.flash or self.partition_len is not None


def judge_plan(
    plan: Plan, packages: Packages, model_config: Mapping[str, Any] | None
) -> Iterator[Finding]:
    """Name everything that is wrong; `model_config` is the model's config.json if it is known."""
    yield from judge_compiler(packages)
    family = FAMILIES.get("RBLN-CA" if plan.npu is None else plan.npu[:7])
    if family is None:
        yield Finding(f"--npu {plan.npu} is no card known here", "RBLN-CA25, RBLN-CR03 and alike")
    else:
        yield from _judge_lengths(plan, family)
    yield from _judge_batches(plan)
    if model_config is not None:
        yield from _judge_model(plan, model_config)
    yield from _judge_disk(plan)


def judge_compiler(packages: Packages) -> Iterator[Finding]:
    """Say whether the compiler is there and fits."""
    optimum = packages.versions.get("optimum-rbln")
    if optimum is None:
        yield Finding("optimum-rbln is not installed", "pip install optimum-rbln==0.12.*")
        return
    minor = ".".join(optimum.split(".")[:2])
    if not packages.rebel:
        yield Finding("rebel-compiler is not installed", INSTALL.format(minor))
        return
    yield from judge_packages(packages)
    compiler = packages.versions.get("rebel-compiler")
    if compiler is not None and "vllm-rbln" not in packages.versions:
        pretend = Packages({"vllm-rbln": optimum, "rebel-compiler": compiler}, rebel=True)
        yield from (f for f in judge_packages(pretend) if "different" in f.problem)


def _judge_lengths(plan: Plan, family: Family) -> Iterator[Finding]:
    length = plan.max_seq_len
    if plan.uses_flash:
        part = plan.partition_len or family.default_partition
        if not MIN_PARTITION <= part <= family.max_partition:
            yield Finding(
                f"--partition-len {part} is outside {MIN_PARTITION} to {family.max_partition}, "
                f"the limits of {family.name}",
                f"The default is {family.default_partition}",
            )
        elif length % part or length // part < 2:
            yield Finding(
                f"--max-seq-len {length} is not 2 or more whole partitions of {part}",
                f"Next that fits: {max(2, -(-length // part)) * part}, or another --partition-len",
            )
    elif length > family.max_eager:
        yield Finding(
            f"--max-seq-len {length} exceeds {family.name}'s {family.max_eager} without flash "
            "attention",
            f"Add --flash --partition-len {family.default_partition}",
        )
    chunk = plan.prefill_chunk
    if chunk is not None and chunk % CHUNK_MULTIPLE:
        yield Finding(
            f"--prefill-chunk {chunk} is no multiple of {CHUNK_MULTIPLE}",
            "The default is 128 on ATOM and 512 on REBEL",
        )


def _judge_batches(plan: Plan) -> Iterator[Finding]:
    if plan.batch_size == 1:
        yield Finding("--batch-size 1 serves one request at a time", "Use 4 or more", fatal=False)
    if plan.buckets and max(plan.buckets) != plan.batch_size:
        yield Finding(
            f"the largest decode bucket, {max(plan.buckets)}, is not the batch size "
            f"{plan.batch_size}",
            f"--buckets {plan.batch_size},... with smaller ones behind it",
        )


def _judge_model(plan: Plan, config: Mapping[str, Any]) -> Iterator[Finding]:
    names = config.get("architectures") or []
    if not ARCHITECTURES.intersection(names):
        yield Finding(
            f"{', '.join(names) or 'this model'} is not served by vllm-rbln 0.12 from a compiled "
            "folder",
            f"Supported: {', '.join(sorted(ARCHITECTURES))}",
        )
    trained = config.get("max_position_embeddings")
    if isinstance(trained, int) and plan.max_seq_len > trained:
        yield Finding(
            f"--max-seq-len {plan.max_seq_len} is longer than the model's {trained} positions",
            f"Use --max-seq-len {trained} or less",
        )


def _judge_disk(plan: Plan) -> Iterator[Finding]:
    if plan.output.exists() and not plan.overwrite:
        yield Finding(f"{plan.output} exists", "Name another folder, or add --overwrite")
    source = Path(plan.model)
    if not source.is_dir():
        return
    existing = next(
        p for p in [plan.output.absolute(), *plan.output.absolute().parents] if p.exists()
    )
    free, need = shutil.disk_usage(existing).free, folder_size(source) * SPACE_FACTOR
    if free < need:
        yield Finding(
            f"{existing} has {free / GIB:.1f} GiB free; about {need / GIB:.1f} will be needed",
            "Free some, or name an output folder on another disk",
        )
