"""`python -m worker.check`: shows what a worker would run, and problems with their remedies.

It first checks settings, packages and model without importing the engine's library. If that finds
nothing fatal, it runs the engine's `dry_run`: a start that loads no model.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import click

from contract.errors import StoreUnavailable
from contract.redis.batches import BatchStore
from contract.redis.connect import masked
from contract.settings import SettingsError
from worker.engine.catalogue import dry_run, find_engine, load_settings
from worker.engine.spec import Preflight, answer_limit
from worker.machine import devices
from worker.machine.finding import Finding, Refused
from worker.models.config import Model, models_of
from worker.models.residence import with_residences
from worker.settings import WorkerSettings
from worker.tools.command import CONTEXT, problem_lines, run, version_option


def check_engine(settings: WorkerSettings) -> Preflight:
    """Return the engine's own preflight, with the rows that every engine has."""
    preflight = find_engine(settings.engine).check(settings)
    preflight.rows.setdefault("answers", answer_limit(settings.default_max_tokens))
    preflight.rows.setdefault("memory", f"{devices.machine().free / 2**30:.1f} GiB free")
    return preflight


def try_start(settings: WorkerSettings, preflight: Preflight) -> None:
    """Add the problems that only a start finds. Takes seconds to import the engine's library."""
    logger = logging.getLogger("worker")
    level = logger.level
    logger.setLevel(logging.ERROR)  # `preflight` has its warnings already
    if sys.stderr.isatty():
        click.echo("trying a start without the model, which takes some seconds ...", err=True)
    try:
        dry_run(settings, preflight)
    except Refused as error:
        preflight.findings += error.findings
    except SettingsError as error:
        remedy = "Correct it: a worker would refuse to start with the same text"
        preflight.findings += [Finding(line, remedy) for line in error.message.splitlines()]
    finally:
        logger.setLevel(level)


def check_redis(settings: WorkerSettings, preflight: Preflight) -> None:
    """Add the queue's length and workers, or the problem that Redis does not answer."""
    url, queue = settings.redis_url.get_secret_value(), settings.queue_to_drain
    try:
        with closing(BatchStore.open(url, "check", ttl_ms=settings.result_ttl_ms)) as store:
            waiting = sum(store.queue_lengths(queue).values())
            workers = len(store.workers(queue))
        preflight.rows["queue"] = f"{queue}: {waiting} waiting, {workers} other workers"
        preflight.rows["Redis"] = masked(url)
    except StoreUnavailable as error:
        preflight.rows["Redis"] = masked(url) + ": unreachable"
        preflight.findings.append(Finding(str(error), "Start Redis, or set WARMQ_REDIS_URL"))


def check_models(models: Mapping[str, Model]) -> Preflight:
    """Return the rows and problems of all models; those that all have are shown once."""
    models, residences = with_residences(models)
    preflights = {name: check_worker(model.settings) for name, model in models.items()}
    preflight = Preflight()
    for name, own in preflights.items():
        for row, text in own.rows.items():
            shared = all(other.rows.get(row) == text for other in preflights.values())
            preflight.rows[row if shared else f"{name}: {row}"] = text
        preflight.rows[f"{name}: residence"] = str(residences[name])
        for finding in own.findings:
            if all(finding in other.findings for other in preflights.values()):
                preflight.findings += [] if finding in preflight.findings else [finding]
            else:
                problem = f"model {name!r}: {finding.problem}"
                preflight.findings.append(replace(finding, problem=problem))
    return preflight


def check_worker(settings: WorkerSettings) -> Preflight:
    """Return the rows and problems of a worker with one model."""
    preflight = check_engine(settings)
    if not any(finding.fatal for finding in preflight.findings):
        try_start(settings, preflight)
    check_redis(settings, preflight)
    return preflight


def report(rows: Mapping[str, str], findings: Sequence[Finding]) -> str:
    """Return the rows and problems as text."""
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    lines += (f"\n{problem}" for problem in problem_lines(findings))
    if not any(finding.fatal for finding in findings):
        lines += ["", "No problems found."]
    return "\n".join(lines)


@click.command("check", context_settings=CONTEXT)
@version_option
def command() -> int:
    """Show what a worker with these settings would run, and what keeps it from starting.

    Settings are read from WARMQ_* variables, .env and warmq.toml, as a worker reads them. Nothing
    is loaded and no request is taken; the engine's library is imported, and its servers are asked
    once, which takes some seconds.

    \b
    Exit status:
      0  no problem
      1  a problem: a worker would not start, or would fail or wait
      2  the command line or the settings themselves are wrong
    """
    settings = load_settings()
    models = models_of(settings)
    preflight = check_models(models) if models else check_worker(settings)
    click.echo(report(preflight.rows, preflight.findings))
    return 1 if any(finding.fatal for finding in preflight.findings) else 0


main = partial(run, command)
