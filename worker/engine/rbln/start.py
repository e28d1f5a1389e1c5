"""Before an RBLN engine starts: checks, limits, devices. Called before vLLM is imported."""

import os
from collections.abc import Iterator

from worker.engine.rbln.model import Artefact, read_artefact
from worker.engine.rbln.rules import judge_artefact, judge_packages, judge_settings, limit_options
from worker.engine.spec import Preflight
from worker.engine.tie import ASK_FIRST_ENV
from worker.engine.vllm_settings import EngineArgs, VllmSettings
from worker.machine import devices
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
    limits = limit_options(artefact, packages.versions["vllm-rbln"]) if artefact else []
    args = EngineArgs(" ".join([settings.engine_args, *limits]))
    return settings.model_copy(update={"engine_args": args, "kill_grace_s": grace})


def choose_devices(wanted: str | None, packages: Packages) -> None:
    """Set the variable that this release reads and unset the other; without a choice, neither."""
    chosen = wanted or os.environ.get(devices.VISIBLE) or os.environ.get(OLD_VISIBLE)
    if chosen is None:
        return
    old = (packages.release("vllm-rbln") or (0, 12)) < (0, 12)
    os.environ.pop(devices.VISIBLE if old else OLD_VISIBLE, None)
    os.environ[OLD_VISIBLE if old else devices.VISIBLE] = chosen


def look_at_cards(
    wanted: str | None, artefact: Artefact, packages: Packages, seen: Preflight
) -> None:
    """Add the NPUs and what runs on them to the table, and what is wrong with them; seconds.

    `wanted` is WARMQ_RBLN_DEVICES.
    """
    cards = devices.visible_cards(wanted) if packages.rebel else devices.Cards()
    emulated = " (emulated)" if packages.emulated else ""
    shown = ", ".join(cards.names) or "none"
    needs = f"{artefact.num_devices} x {artefact.npu or 'any card'}"
    seen.rows["devices"] = f"{shown}{emulated}; the model needs {needs}"
    if packages.rebel:
        seen.found += _judge_cards(artefact, cards)
    mine = {int(n) for n in (wanted or "").split(",") if n}
    for card, pids in sorted(devices.holders().items()):
        if mine and card not in mine:
            continue
        held = Finding(
            f"/dev/rbln{card} is open in process {', '.join(map(str, sorted(pids)))}",
            "One engine per card: choose another in WARMQ_RBLN_DEVICES, or stop it with SIGTERM",
        )
        seen.found.append(held)
    buckets = "/".join(map(str, artefact.buckets))
    seen.rows["capacity"] = (
        f"{artefact.batch_size} requests at once of {artefact.max_seq_len} tokens; decode "
        f"batches {buckets}, prefill by {artefact.prefill_chunk}, KV blocks "
        f"{artefact.kv_blocks or '?'}"
    )


def _judge_cards(artefact: Artefact, cards: devices.Cards) -> Iterator[Finding]:
    """Compare the NPUs with what the model was compiled for."""
    if cards.trouble:
        yield Finding(
            f"the RBLN runtime cannot be asked for its NPUs: {cards.trouble}",
            "Look at `rbln-smi`: is the driver loaded, are /dev/rbln* given to this container?",
        )
        return
    if len(cards.names) < artefact.num_devices:
        yield Finding(
            f"the model was compiled for {artefact.num_devices} devices and {len(cards.names)} "
            "are visible",
            "Name enough in WARMQ_RBLN_DEVICES, or recompile with fewer: --num-devices",
        )
    elif idle := len(cards.names) - artefact.num_devices:
        yield Finding(
            f"{idle} of {len(cards.names)} cards stay idle: the model was compiled for "
            f"{artefact.num_devices}",
            "Start another worker with the other cards in WARMQ_RBLN_DEVICES",
            fatal=False,
        )
    for name in dict.fromkeys(cards.names):
        if artefact.npu is not None and name != artefact.npu:
            yield Finding(
                f"the model was compiled for {artefact.npu} and the card is {name}",
                f"Recompile it: python -m worker.compile MODEL -o DIR --npu {name}",
            )
