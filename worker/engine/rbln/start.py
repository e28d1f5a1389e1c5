"""Makes an RBLN engine's start right: called before anything of vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

from worker.engine.end import ASK_FIRST_ENV
from worker.engine.rbln.model import Artefact, read_artefact
from worker.engine.rbln.rules import (
    judge_artefact,
    judge_packages,
    judge_settings,
    limit_options,
)
from worker.engine.vllm_settings import VllmSettings
from worker.machine.devices import VISIBLE
from worker.machine.finding import Finding, refuse_fatal
from worker.machine.packages import Packages, installed

#: Its name before 0.12, still read there with a warning.
OLD_VISIBLE = "RBLN_DEVICES"
#: A killed engine may leave its card unusable, so one that hangs gets long to end by itself.
RBLN_KILL_GRACE_S = 120.0


def findings(
    settings: VllmSettings, artefact: Artefact | None, packages: Packages
) -> Iterator[Finding]:
    """Name everything that is wrong, or to be known, before this engine is started."""
    yield from judge_packages(packages)
    if artefact is not None:
        yield from judge_artefact(artefact, packages)
        yield from judge_settings(settings, artefact)
        yield Finding(
            "requests that set `seed` are sampled unseeded: RBLN does not support it",
            "Use temperature 0 where answers must repeat",
            fatal=False,
        )


def prepare(settings: VllmSettings) -> VllmSettings:
    """Return the settings as the engine needs them, and choose the devices.

    Changes the environment, which the vendor's packages read when they are imported.

    Raises:
        SettingsError: naming every fatal problem and its remedy.
    """
    packages = installed()
    artefact = read_artefact(settings.model)
    if artefact is None and not packages.rbln:
        return settings
    refuse_fatal(findings(settings, artefact, packages))
    choose_devices(settings.rbln_devices, packages)
    grace = RBLN_KILL_GRACE_S if settings.kill_grace_s is None else settings.kill_grace_s
    os.environ[ASK_FIRST_ENV] = f"{grace:g}"
    words = limit_options(artefact, packages.versions["vllm-rbln"]) if artefact else []
    args = settings.engine_args.and_then(words)
    return settings.model_copy(update={"engine_args": args, "kill_grace_s": grace})


def choose_devices(wanted: str | None, packages: Packages) -> None:
    """Set the variable that this release reads and unset the other; without a choice, neither."""
    devices = wanted or os.environ.get(VISIBLE) or os.environ.get(OLD_VISIBLE)
    if devices is None:
        return
    old = (packages.release("vllm-rbln") or (0, 12)) < (0, 12)
    os.environ.pop(VISIBLE if old else OLD_VISIBLE, None)
    os.environ[OLD_VISIBLE if old else VISIBLE] = devices
