"""`python -m worker.triton MODEL_DIR -o REPO`: writes or checks a Triton model repository."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from contract.settings import SettingsError
from worker.engine.rbln.model import read_artefact
from worker.engine.triton.rules import (
    ARGS_FILE,
    CONFIG_FILE,
    CONFIG_PARAMETERS,
    HEALTH,
    check_model,
    check_repository,
    parameter_line,
)
from worker.machine.finding import Finding
from worker.tools.command import CONTEXT, FOLDER, problem_lines, run, version_option

#: max_num_seqs if the user does not set it. It is always written, because workers have to know it,
#: and vLLM's default depends on GPU and release.
MAX_NUM_SEQS = 256
#: The end of the help text of --max-num-seqs.
SLOTS_DEFAULT = f"Default: {MAX_NUM_SEQS}, or what the model is compiled for."
#: The help text of --set.
SET_HELP = "Another engine argument of vLLM, for example tensor_parallel_size=2; repeatable."
#: The content of config.pbtxt.
CONFIG = """\
# Written by `python -m worker.triton`.
name: "{name}"
backend: "vllm"

# The engine takes its devices itself; Triton gives it none.
instance_group [ {{ count: 1 kind: KIND_MODEL }} ]

# A model whose engine died is not ready any more: warmq's workers then wait, or use another
# server. Triton does this only with --model-control-mode=explicit --load-model={name}.
{health}

# Workers read these parameters, because Triton does not show them model.json.
{parameters}
"""


def _read_pairs(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text}: write KEY=JSON")
        try:
            arguments[key.replace("-", "_")] = json.loads(value)
        except ValueError:
            arguments[key.replace("-", "_")] = value
    return arguments


@click.command("triton", context_settings=CONTEXT)
@click.argument("model", metavar="[MODEL_DIR]", type=FOLDER, required=False)
@click.option("-o", "--output", metavar="REPO", type=FOLDER, help="Repository to write into.")
@click.option("--check", metavar="REPO", type=FOLDER, help="Check an existing repository.")
@click.option(
    "--name", default="vllm_model", show_default=True, help="Name by which the model is served."
)
@click.option("--model-path", metavar="DIR", help="MODEL_DIR as the server sees it, if different.")
@click.option(
    "--max-num-seqs", metavar="N", type=int, help=f"Requests that run at once. {SLOTS_DEFAULT}"
)
@click.option("--max-model-len", metavar="N", type=int, help="Context, in tokens. Default: vLLM's.")
@click.option(
    "--set", "pairs", metavar="KEY=JSON", multiple=True, callback=_read_pairs, help=SET_HELP
)
@click.option("--overwrite", is_flag=True, help="Replace the files in REPO/NAME.")
@version_option
def command(
    model: Path | None,
    output: Path | None,
    check: Path | None,
    name: str,
    model_path: str | None,
    pairs: dict[str, Any],
    overwrite: bool,
    **limits: int | None,
) -> int:
    """Write a Triton model repository for vLLM's backend, or --check one.

    Writes NAME/config.pbtxt and NAME/1/model.json into REPO, for a GPU or, where MODEL_DIR was
    compiled by optimum-rbln, for RBLN, and checks them.

    \b
    Exit status:
      0  no problem
      1  a problem
      2  the command line is wrong, or MODEL_DIR cannot be served
    """
    if check is not None and (model is None or output is None):
        return report(list(check_repository(check)))
    if check is not None or model is None or output is None:
        raise click.UsageError("name MODEL_DIR and -o REPO, or --check REPO")
    arguments, parameters = describe(model, model_path, limits, pairs)
    folder = output / name
    if folder.exists() and not overwrite:
        raise SettingsError(f"{folder} exists: choose another --name, or give --overwrite")
    _write(folder, arguments, parameters)
    click.echo(f"written: {folder}")
    return report(list(check_model(folder)))


main = partial(run, command)


def describe(
    model: Path, model_path: str | None, limits: dict[str, int | None], pairs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the keys of model.json, and the parameters of config.pbtxt for the workers.

    Raises:
        SettingsError: MODEL_DIR is damaged, or does not fit the options.
    """
    if not model.is_dir():
        raise SettingsError(f"{model} is not a folder")
    arguments: dict[str, Any] = {"model": model_path or str(model.resolve())}
    set_limits = {name: limit for name, limit in limits.items() if limit}
    artefact = read_artefact(model)
    if artefact is None:
        arguments |= {"max_num_seqs": MAX_NUM_SEQS} | set_limits | pairs
        served_limits = arguments
    else:
        # vllm-rbln reads every limit from the compiled folder, and refuses some other values.
        served_limits = {"max_num_seqs": artefact.batch_size, "max_model_len": artefact.max_seq_len}
        if not set_limits.items() <= served_limits.items():
            raise SettingsError(
                f"{model} is compiled for {artefact.batch_size} requests at once of "
                f"{artefact.max_seq_len} tokens: leave --max-num-seqs and --max-model-len out, or "
                "recompile it"
            )
        arguments |= pairs
    parameters = {
        name: served_limits[key] for name, key in CONFIG_PARAMETERS.items() if key in served_limits
    }
    return arguments, parameters


def _write(folder: Path, arguments: dict[str, Any], parameters: dict[str, int]) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1" / ARGS_FILE).write_text(json.dumps(arguments, indent=2) + "\n")
    (folder / CONFIG_FILE).write_text(
        CONFIG.format(
            name=folder.name,
            health=parameter_line(HEALTH, "true"),
            parameters="\n".join(parameter_line(*each) for each in parameters.items()),
        )
    )


def report(findings: Sequence[Finding]) -> int:
    """Print the problems, and return the exit status."""
    for problem in [*problem_lines(findings)] or ["No problems found."]:
        click.echo(problem)
    return 1 if any(finding.fatal for finding in findings) else 0
