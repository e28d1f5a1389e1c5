"""Write or check a Triton model repository: `python -m worker.triton MODEL_DIR -o REPO`.

Writes `<name>/config.pbtxt` and `<name>/1/model.json` for the vLLM backend, for a GPU or, where
MODEL_DIR was compiled by optimum-rbln, for RBLN. `--check REPO` names what is wrong with one.
Exit status: 0 nothing in the way, 1 something is, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.settings import SettingsError
from worker.engine.rbln.model import read_artefact
from worker.engine.triton.engine import LENGTH_PARAMETER as LENGTH
from worker.engine.triton.engine import SLOTS_PARAMETER as SLOTS
from worker.engine.triton.rules import (
    ARGS_FILE,
    CONFIG_FILE,
    HEALTH,
    judge_model,
    judge_repository,
    parameter_line,
)
from worker.machine.finding import Finding

#: vLLM's own default differs by GPU and release; the workers have to know what it is.
MAX_NUM_SEQS = 256
CONFIG = """\
# Written by `python -m worker.triton`.
name: "{name}"
backend: "vllm"

# The engine takes its devices itself; Triton gives it none.
instance_group [ {{ count: 1 kind: KIND_MODEL }} ]

# A model whose engine died is not ready any more: warmq's workers then wait, or go to another
# server. Triton honours it with --model-control-mode=explicit --load-model={name} only.
{health}

# Read by the workers, not by vLLM: Triton shows model.json to nobody.
{told}
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m worker.triton", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="folder of the model")
    parser.add_argument("-o", "--output", type=Path, help="model repository to write into")
    parser.add_argument("--check", type=Path, metavar="REPO", help="check an existing repository")
    parser.add_argument("--name", default="vllm_model", help="name it is served by (vllm_model)")
    parser.add_argument("--model-path", help="where the server finds the folder; default: the same")
    parser.add_argument("--max-num-seqs", type=int, help=f"requests at once ({MAX_NUM_SEQS})")
    parser.add_argument("--max-model-len", type=int, help="context, in tokens; default: vLLM's")
    parser.add_argument(
        "--set", action="append", default=[], type=_pair, metavar="KEY=JSON",
        help="any other engine argument of vLLM, as tensor_parallel_size=2",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace files of that name")
    given = parser.parse_args(argv)
    if (given.check is None) == (given.model is None or given.output is None):
        parser.error("name MODEL_DIR and -o REPO, or --check REPO")
    return given


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: write KEY=JSON")
    try:
        return key.replace("-", "_"), json.loads(value)
    except ValueError:
        return key.replace("-", "_"), value


def describe(given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, int]]:
    """Return model.json's keys, and what config.pbtxt tells the workers.

    Raises:
        SettingsError: MODEL_DIR is damaged, or not what the options say.
    """
    if not given.model.is_dir():
        raise SettingsError(f"{given.model} is no folder")
    arguments: dict[str, Any] = {"model": given.model_path or str(given.model.resolve())}
    artefact = read_artefact(given.model)
    if artefact is None:
        slots, length = given.max_num_seqs or MAX_NUM_SEQS, given.max_model_len
        arguments["max_num_seqs"] = slots
        if length is not None:
            arguments["max_model_len"] = length
    else:
        # vllm-rbln reads every limit from the compiled folder, and refuses some that differ.
        slots, length = artefact.batch_size, artefact.max_seq_len
        for option, compiled in ((given.max_num_seqs, slots), (given.max_model_len, length)):
            if option not in (None, compiled):
                raise SettingsError(
                    f"{given.model} is compiled for {slots} requests at once of {length} tokens: "
                    "leave --max-num-seqs and --max-model-len out, or recompile it"
                )
    arguments |= dict(given.set)
    if artefact is None:
        slots = arguments["max_num_seqs"]
        length = arguments.get("max_model_len")
    return arguments, {SLOTS: slots} | ({} if length is None else {LENGTH: length})


def write(given: argparse.Namespace) -> Path:
    """Write one model into the repository; return its folder.

    Raises:
        SettingsError: something of that name is there, or MODEL_DIR cannot be served.
    """
    arguments, told = describe(given)
    folder: Path = given.output / given.name
    if folder.exists() and not given.overwrite:
        raise SettingsError(f"{folder} exists: choose another --name, or give --overwrite")
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1" / ARGS_FILE).write_text(json.dumps(arguments, indent=2) + "\n")
    (folder / CONFIG_FILE).write_text(
        CONFIG.format(
            name=given.name,
            health=parameter_line(HEALTH, "true"),
            told="\n".join(parameter_line(key, value) for key, value in told.items()),
        )
    )
    return folder


def report(found: Sequence[Finding]) -> int:
    """Print the problems; return the exit status."""
    for finding in sorted(found, key=lambda one: not one.fatal):
        mark = "problem" if finding.fatal else "note"
        sys.stdout.write(f"{mark}: {finding.problem}\n  do: {finding.remedy}\n")
    if not found:
        sys.stdout.write("Nothing in the way.\n")
    return 1 if any(one.fatal for one in found) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check; return the exit status."""
    given = parse(sys.argv[1:] if argv is None else argv)
    if given.check is not None:
        return report(list(judge_repository(given.check)))
    try:
        folder = write(given)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"written: {folder}\n")
    return report(list(judge_model(folder)))
