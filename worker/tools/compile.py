"""`python -m worker.compile MODEL -o DIR --max-seq-len 8192 ...`: compiles a model for RBLN.

It checks the options, runs the vendor's compiler (optimum-rbln) for minutes to hours, writes a
manifest that records how the model was compiled, and gives the folder its final name. The limits
are those of optimum-rbln 0.12 (modeling_attention_utils.py, vllm-rbln's registry.py).
"""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from worker.engine.rbln.rules import INSTALL, check_packages
from worker.machine.devices import folder_size
from worker.machine.finding import Finding, warning
from worker.machine.packages import Packages, installed
from worker.tools.command import CONTEXT, FOLDER, USAGE, run, version_option

#: Architectures of text models that vllm-rbln 0.12 can serve from a compiled folder.
ARCHITECTURES = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Llama", "Gemma", "Gemma2", "Phi", "Midm", "Mistral", "Exaone", "Qwen2", "OPT", "Qwen3",
        "Qwen3Moe", "GptOss",
    )
) | {"GPT2LMHeadModel", "MidmLMHeadModel"}  # fmt: skip
#: Fewest tokens of a partition of flash attention.
MIN_PARTITION = 1024
#: The number of tokens of a prefill chunk must be a multiple of this.
CHUNK_MULTIPLE = 64
#: Estimated size of the compiled files, as a multiple of the model's files.
SPACE_FACTOR = 2.0
#: Bytes of one GiB.
GIB = 2**30


#: Families of cards, by the first letters of a card's name; the compiler's default is first. The
#: values are the family's name and a number of tokens: the longest context without flash attention,
#: which is also the longest partition with it. The default partition is half of that.
FAMILIES = {"RBLN-CA": ("ATOM", 32_768), "RBLN-CR": ("REBEL", 16_384)}


@dataclass(frozen=True, slots=True)
class Plan:
    """One compilation. Lengths are in tokens; for None optimum-rbln chooses."""

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
        """Return the arguments for optimum-rbln. Compiling needs no NPU."""
        arguments = {
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
        return {k: v for k, v in arguments.items() if v is not None} | {"create_runtimes": False}

    @property
    def uses_flash(self) -> bool:
        """Whether the model uses flash attention, with the context split into partitions."""
        return self.flash or self.partition_len is not None


def check_plan(
    plan: Plan, packages: Packages, model_config: Mapping[str, Any] | None
) -> Iterator[Finding]:
    """Check a plan. `model_config` is the model's config.json, if it is known."""
    yield from check_compiler(packages)
    family = FAMILIES.get("RBLN-CA" if plan.npu is None else plan.npu[:7])
    if family is None:
        yield Finding(f"--npu {plan.npu} is not a known card", "Write RBLN-CA25, RBLN-CR03, …")
    else:
        yield from _check_lengths(plan, *family)
    yield from _check_batches(plan)
    if model_config is not None:
        yield from _check_model(plan, model_config)
    yield from _check_disk(plan)


def check_compiler(packages: Packages) -> Iterator[Finding]:
    """Check that the compiler is installed, and that its packages' versions match."""
    optimum = packages.versions.get("optimum-rbln")
    if optimum is None:
        yield Finding("optimum-rbln is not installed", "pip install optimum-rbln==0.12.*")
        return
    minor = ".".join(optimum.split(".")[:2])
    if not packages.rebel:
        yield Finding("rebel-compiler is not installed", INSTALL.format(minor))
        return
    yield from check_packages(packages)
    compiler = packages.versions.get("rebel-compiler")
    if compiler is not None and "vllm-rbln" not in packages.versions:
        assumed = Packages({"vllm-rbln": optimum, "rebel-compiler": compiler}, rebel=True)
        yield from (f for f in check_packages(assumed) if "different" in f.problem)


def _check_lengths(plan: Plan, family: str, longest: int) -> Iterator[Finding]:
    length = plan.max_seq_len
    if plan.uses_flash:
        partition = plan.partition_len or longest // 2
        if not MIN_PARTITION <= partition <= longest:
            yield Finding(
                f"--partition-len {partition} is outside {MIN_PARTITION} to {longest}, the "
                f"limits of {family}",
                f"The default is {longest // 2}",
            )
        elif length % partition or length // partition < 2:
            longer = max(2, -(-length // partition)) * partition
            yield Finding(
                f"--max-seq-len {length} is not 2 or more whole partitions of {partition}",
                f"Use --max-seq-len {longer}, or another --partition-len",
            )
    elif length > longest:
        yield Finding(
            f"--max-seq-len {length} exceeds {family}'s {longest} without flash attention",
            f"Add --flash --partition-len {longest // 2}",
        )
    chunk = plan.prefill_chunk
    if chunk is not None and chunk % CHUNK_MULTIPLE:
        yield Finding(
            f"--prefill-chunk {chunk} is not a multiple of {CHUNK_MULTIPLE}",
            "The default is 128 on ATOM and 512 on REBEL",
        )


def _check_batches(plan: Plan) -> Iterator[Finding]:
    if plan.batch_size == 1:
        yield warning("--batch-size 1 serves one request at a time", "Use 4 or more")
    if plan.buckets and max(plan.buckets) != plan.batch_size:
        yield Finding(
            f"the largest decode bucket, {max(plan.buckets)}, is not the batch size "
            f"{plan.batch_size}",
            f"Write --buckets {plan.batch_size},... with smaller ones after it",
        )


def _check_model(plan: Plan, config: Mapping[str, Any]) -> Iterator[Finding]:
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


def _check_disk(plan: Plan) -> Iterator[Finding]:
    if plan.output.exists() and not plan.overwrite:
        yield Finding(f"{plan.output} exists", "Name another folder, or add --overwrite")
    source = Path(plan.model)
    if not source.is_dir():
        return
    output = plan.output.absolute()
    existing = next(folder for folder in (output, *output.parents) if folder.exists())
    free, need = shutil.disk_usage(existing).free, folder_size(source) * SPACE_FACTOR
    if free < need:
        yield Finding(
            f"{existing} has {free / GIB:.1f} GiB free; about {need / GIB:.1f} will be needed",
            "Free disk space, or name an output folder on another disk",
        )


# -- the command ----------------------------------------------------------------

#: The file in the compiled folder that records how the model was compiled.
MANIFEST = "warmq_compile.json"
#: Seconds between two lines of progress.
TICK_S = 30.0
#: The values of --dtype.
DTYPES = click.Choice(["float32", "float16", "bfloat16"])
#: The help text of --buckets.
BUCKETS_HELP = "Batch sizes of decode steps, for example 4,2,1. Default: the batch size."
#: The help text of --dtype.
DTYPE_HELP = "Type of weights and KV cache. Default: the model's."
#: The help text of --npu.
NPU_HELP = "Card, for example RBLN-CA25; required on a machine without an NPU."
#: Makes an option for a whole number from 1.
number = partial(click.option, metavar="N", type=click.IntRange(min=1))


def _read_buckets(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    sizes = text.split(",") if text else []
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise click.BadParameter(
            "write whole numbers from 1, separated by commas, for example 4,2,1"
        )
    return tuple(sorted(map(int, sizes), reverse=True))


@click.command("compile", context_settings=CONTEXT)
@click.argument("model")
@click.option("-o", "--output", metavar="DIR", type=FOLDER, required=True, help="Folder to write.")
@number("--batch-size", default=4, show_default=True, help="Requests that run at once.")
@number("--max-seq-len", required=True, help="Context, in tokens.")
@number("--num-devices", default=1, show_default=True, help="NPUs it is spread over.")
@click.option("--buckets", metavar="N,N", default="", callback=_read_buckets, help=BUCKETS_HELP)
@click.option("--flash", is_flag=True, help="Flash attention, for long contexts.")
@number("--partition-len", help="Partitions of flash attention, in tokens.")
@number("--kv-blocks", help="KV blocks. Default: what fits.")
@number("--prefill-chunk", help="Tokens per prefill step.")
@click.option("--npu", metavar="CARD", help=NPU_HELP)
@click.option("--dtype", type=DTYPES, help=DTYPE_HELP)
@click.option("--overwrite", is_flag=True, help="Replace the output folder.")
@version_option
def command(**options: Any) -> int:
    """Compile MODEL, a folder or a hub name, for Rebellions NPUs.

    Everything that can be checked is checked first: lengths, batch sizes, architecture, packages,
    disk space. Then the vendor's compiler runs for minutes to hours.

    \b
    Exit status:
      0  compiled
      1  the compiler failed
      2  refused before it began
    """
    return compile_model(Plan(**options))


main = partial(run, command)


def compile_model(plan: Plan) -> int:
    """Check a plan, compile, and give the folder its final name; return the exit status."""
    packages = installed()
    usable = not any(f.fatal for f in check_compiler(packages))
    config = model_config(plan.model, usable)
    findings = list(check_plan(plan, packages, config))
    for finding in findings:
        show(f"{'refused' if finding.fatal else 'note'}: {finding}")
    if any(f.fatal for f in findings):
        return USAGE
    unfinished = plan.output.with_name(plan.output.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        compile_into(plan, unfinished)
    except Exception as error:  # after any exception, no partial folder must stay
        shutil.rmtree(unfinished, ignore_errors=True)
        show(f"the compiler failed: {type(error).__name__}: {error}")
        return 1
    manifest = describe(plan, packages.versions, packages.emulated, config or {})
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if plan.overwrite:
        shutil.rmtree(plan.output, ignore_errors=True)
    unfinished.rename(plan.output)
    show(f"done. Check it: WARMQ_MODEL={plan.output} python -m worker.check")
    return 0


def model_config(model: str, packages_usable: bool) -> dict[str, Any] | None:
    """Return the model's config.json; None if it is on the hub and the packages are not usable."""
    file = Path(model) / "config.json"
    content: dict[str, Any]
    if file.is_file():
        content = json.loads(file.read_text("utf-8"))
        return content
    if not packages_usable:
        return None
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    content = config.to_dict()
    return content | {"_commit_hash": config._commit_hash}


def compile_into(plan: Plan, folder: Path) -> None:
    """Run the vendor's compiler. Takes minutes to hours."""
    with progress("loading optimum-rbln"):
        from optimum.rbln import RBLNAutoModelForCausalLM
        from transformers import AutoTokenizer
    dtype = {"dtype": plan.dtype} if plan.dtype else {}
    with progress(f"compiling {plan.model}: {plan.rbln_config()}"):
        model = RBLNAutoModelForCausalLM.from_pretrained(
            plan.model, export=True, rbln_config=plan.rbln_config(), **dtype
        )
    with progress(f"writing {folder}"):
        model.save_pretrained(str(folder))
        AutoTokenizer.from_pretrained(plan.model).save_pretrained(str(folder))


def describe(
    plan: Plan, versions: dict[str, str], emulated: bool, config: dict[str, Any]
) -> dict[str, Any]:
    """Return the manifest, which records how the model was compiled."""
    text = json.dumps(config, sort_keys=True).encode()
    return {
        "source": plan.model,
        "source_revision": config.get("_commit_hash"),
        "source_config_sha256": hashlib.sha256(text).hexdigest(),
        "dtype": plan.dtype,
        "rbln_config": plan.rbln_config(),
        "versions": versions,
        "emulated": emulated,
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Print a step's start, its time every TICK_S seconds, and how long it took."""
    show(what)
    began, ended = time.monotonic(), threading.Event()

    def tick() -> None:
        while not ended.wait(TICK_S):
            show(f"  … {time.monotonic() - began:.0f} s")

    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
    show(f"  took {time.monotonic() - began:.1f} s")


def show(text: str) -> None:
    """Print one line of progress."""
    click.echo(f"compile: {text}", err=True)
