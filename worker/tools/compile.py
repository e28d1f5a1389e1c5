"""Compile a model for RBLN: `python -m worker.compile MODEL -o DIR --batch-size 4 ...`.

Wraps optimum-rbln: checks first (compile_plan.py), then minutes to hours of the vendor's
compiler, then the folder under its final name, with a manifest of how it was made.
Exit status: 0 compiled, 1 the compiler failed, 2 refused before it began.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worker.machine.packages import installed
from worker.tools.compile_plan import Plan, judge_compiler, judge_plan

MANIFEST = "warmq_compile.json"
TICK_S = 30.0
DTYPES = ("float32", "float16", "bfloat16")


def parse(argv: Sequence[str]) -> Plan:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m worker.compile", description=__doc__)
    number = _positive
    parser.add_argument("model", help="folder or hub name of the original model")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--batch-size", type=number, default=4, help="requests at once (4)")
    parser.add_argument("--max-seq-len", type=number, required=True, help="context, in tokens")
    parser.add_argument("--num-devices", type=number, default=1, help="NPUs it is spread over (1)")
    parser.add_argument("--buckets", type=_numbers, default=(), help="decode batches, as 4,2,1")
    parser.add_argument("--flash", action="store_true", help="flash attention, for long contexts")
    parser.add_argument("--partition-len", type=number, help="its partitions, in tokens")
    parser.add_argument("--kv-blocks", type=number, help="KV blocks; default: what fits")
    parser.add_argument("--prefill-chunk", type=number, help="tokens per prefill step")
    parser.add_argument("--npu", help="card to compile for, as RBLN-CA25; needed without an NPU")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of weights and cache; default: the model's"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder")
    return Plan(**vars(parser.parse_args(argv)))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted((_positive(part) for part in text.split(",")), reverse=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Compile; return the exit status."""
    plan, packages = parse(sys.argv[1:] if argv is None else argv), installed()
    usable = not any(f.fatal for f in judge_compiler(packages))
    config = model_config(plan.model, usable)
    found = list(judge_plan(plan, packages, config))
    for finding in found:
        say(f"{'refused' if finding.fatal else 'note'}: {finding}")
    if any(f.fatal for f in found):
        return 2
    partial = plan.output.with_name(plan.output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        compile_into(plan, partial)
    except Exception as error:  # whatever the compiler raises, a half folder must not stay
        shutil.rmtree(partial, ignore_errors=True)
        say(f"the compiler failed: {type(error).__name__}: {error}")
        return 1
    manifest = describe(plan, packages.versions, packages.emulated, config or {})
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if plan.overwrite:
        shutil.rmtree(plan.output, ignore_errors=True)
    partial.rename(plan.output)
    say(f"done. Check it: WARMQ_MODEL={plan.output} python -m worker.check")
    return 0


def model_config(model: str, packages_usable: bool) -> dict[str, Any] | None:
    """Return the model's config.json, from its folder or the hub; None if it cannot be had yet."""
    file = Path(model) / "config.json"
    if file.is_file():
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return found
    if not packages_usable:
        return None
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(model)
    hub: dict[str, Any] = read.to_dict() | {"_commit_hash": read._commit_hash}
    return hub


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
    sys.stderr.write(f"compile: {text}\n")
    sys.stderr.flush()
