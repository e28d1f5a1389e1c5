"""Compile a model for RBLN: `python -m worker.compile MODEL -o DIR --max-seq-len 8192 ...`.

Wraps optimum-rbln: checks first (compile_plan.py), then minutes to hours of the vendor's
compiler, then the folder under its final name, with a manifest of how it was made.
"""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from worker.machine.packages import installed
from worker.tools.command import CONTEXT, FOLDER, USAGE, run, version_option
from worker.tools.compile_plan import Plan, judge_compiler, judge_plan

MANIFEST = "warmq_compile.json"
TICK_S = 30.0
DTYPES = click.Choice(["float32", "float16", "bfloat16"])
BUCKETS = "Batch sizes of decode steps, as 4,2,1. Default: the batch size."
number = partial(click.option, metavar="N", type=click.IntRange(min=1))


def _sizes(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    sizes = text.split(",") if text else []
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise click.BadParameter("write numbers of 1 or more with commas between, as 4,2,1")
    return tuple(sorted(map(int, sizes), reverse=True))


@click.command("compile", context_settings=CONTEXT)
@click.argument("model")
@click.option("-o", "--output", metavar="DIR", type=FOLDER, required=True, help="Folder to write.")
@number("--batch-size", default=4, show_default=True, help="Requests at once.")
@number("--max-seq-len", required=True, help="Context, in tokens.")
@number("--num-devices", default=1, show_default=True, help="NPUs it is spread over.")
@click.option("--buckets", metavar="N,N", default="", callback=_sizes, help=BUCKETS)
@click.option("--flash", is_flag=True, help="Flash attention, for long contexts.")
@number("--partition-len", help="Partitions of flash attention, in tokens.")
@number("--kv-blocks", help="KV blocks. Default: what fits.")
@number("--prefill-chunk", help="Tokens per prefill step.")
@click.option("--npu", metavar="CARD", help="Card, as RBLN-CA25; needed where no NPU is.")
@click.option("--dtype", type=DTYPES, help="Of weights and KV cache. Default: the model's.")
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
    """Check the plan, compile, and move the folder to its name; return the exit status."""
    packages = installed()
    usable = not any(f.fatal for f in judge_compiler(packages))
    config = model_config(plan.model, usable)
    found = list(judge_plan(plan, packages, config))
    for finding in found:
        say(f"{'refused' if finding.fatal else 'note'}: {finding}")
    if any(f.fatal for f in found):
        return USAGE
    unfinished = plan.output.with_name(plan.output.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        compile_into(plan, unfinished)
    except Exception as error:  # whatever the compiler raises, a half folder must not stay
        shutil.rmtree(unfinished, ignore_errors=True)
        say(f"the compiler failed: {type(error).__name__}: {error}")
        return 1
    manifest = describe(plan, packages.versions, packages.emulated, config or {})
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if plan.overwrite:
        shutil.rmtree(plan.output, ignore_errors=True)
    unfinished.rename(plan.output)
    say(f"done. Check it: WARMQ_MODEL={plan.output} python -m worker.check")
    return 0


def model_config(model: str, packages_usable: bool) -> dict[str, Any] | None:
    """Return the model's config.json, from its folder or the hub; None if it cannot be had yet."""
    file = Path(model) / "config.json"
    config: dict[str, Any] | None = None
    if file.is_file():
        config = json.loads(file.read_text("utf-8"))
    elif packages_usable:
        from transformers import AutoConfig

        read = AutoConfig.from_pretrained(model)
        config = read.to_dict() | {"_commit_hash": read._commit_hash}
    return config


def compile_into(plan: Plan, folder: Path) -> None:
    """Run the vendor's compiler; minutes to hours."""
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
    """Return the manifest: how this folder was made."""
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
    """Say that a step began, every half minute that it still runs, and how long it took."""
    say(what)
    began, over = time.monotonic(), threading.Event()

    def tick() -> None:
        while not over.wait(TICK_S):
            say(f"  … {time.monotonic() - began:.0f} s")

    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        over.set()
    say(f"  took {time.monotonic() - began:.1f} s")


def say(text: str) -> None:
    """Write one line for the person who waits."""
    click.echo(f"compile: {text}", err=True)
