"""Checks packages, compiled model, options and cards before an RBLN engine starts.

The checks run before vLLM is imported. The rules are from the source code of vllm-rbln and
optimum-rbln 0.8 to 0.12 (docs/how-to/rbln.md has the table).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from enum import Enum

from worker.engine.parent_death import ASK_FIRST_ENV
from worker.engine.rbln.model import Artefact, read_artefact
from worker.engine.spec import Preflight
from worker.engine.vllm_settings import EngineArgs, VllmSettings
from worker.machine import devices
from worker.machine.finding import Finding, refuse_fatal, warning
from worker.machine.packages import Packages, Release, installed, release_of, same_minor

#: How to install rebel-compiler; {0} is the minor version.
INSTALL = (
    "pip install --extra-index-url https://pypi.rbln.ai/simple rebel-compiler=={0}.* "
    "(needs an account of Rebellions' portal)"
)
#: How to recompile a model.
RECOMPILE = "Recompile the model: python -m worker.compile MODEL -o DIR"
#: The first optimum-rbln that cannot load models compiled before Transformers 5.
TRANSFORMERS_5: Release = (0, 11)
#: The name that releases before 0.12 use for devices.VISIBLE. 0.12 still reads it, with a warning.
OLD_VISIBLE = "RBLN_DEVICES"
#: Seconds after which the RBLN runtime aborts a step.
STEP_LIMIT_S = 60
#: Seconds between SIGTERM and SIGKILL for an RBLN engine. The number is high, because a killed
#: engine may leave its card unusable.
RBLN_KILL_GRACE_S = 120.0


class Releases(Enum):
    """Ranges of vllm-rbln releases; each value describes a range in messages."""

    FORK = "ships its own fork of vLLM"
    BY_HAND = "takes the model's limits from the command line, unchecked"
    READS_FILE = "reads rbln_config.json, on a vLLM this worker was not written for"
    SUPPORTED = "reads rbln_config.json"


#: The first release of each range, newest first.
RANGES: tuple[tuple[Release, Releases], ...] = (
    ((0, 12), Releases.SUPPORTED),
    ((0, 9, 3), Releases.READS_FILE),
    ((0, 8, 1), Releases.BY_HAND),
    ((0,), Releases.FORK),
)

#: Options that are refused, and the remedy. Old tutorials and other platforms use them.
REFUSED = {
    "device": "Leave it out: where vllm-rbln is installed the platform is found by itself",
    "compiled-model-dir": "WARMQ_MODEL names the compiled folder",
    "tensor-parallel-size": "Compile for N devices: python -m worker.compile --num-devices N",
    "pipeline-parallel-size": "Compile for N devices: python -m worker.compile --num-devices N",
    "speculative-config": "Leave it out: compiled models decode without speculation",
    "speculative-model": "Leave it out: compiled models decode without speculation",
    "num-speculative-tokens": "Leave it out: compiled models decode without speculation",
}


def releases_of(version: str) -> Releases:
    """Return the range of releases that a vllm-rbln version is in."""
    release = release_of(version)
    return next(releases for since, releases in RANGES if release >= since)


def limit_options(artefact: Artefact, version: str) -> list[str]:
    """Return the options for the model's limits that vllm-rbln needs; empty since 0.9.3."""
    if releases_of(version) is not Releases.BY_HAND:
        return []
    return [
        "--max-num-seqs", str(artefact.batch_size),
        "--max-model-len", str(artefact.max_seq_len),
        "--max-num-batched-tokens", str(artefact.max_seq_len),
        "--block-size", str(artefact.block_size),
    ]  # fmt: skip


def check_rbln(
    settings: VllmSettings, artefact: Artefact | None, packages: Packages
) -> Iterator[Finding]:
    """Check packages, compiled model and settings before the engine starts."""
    yield from check_packages(packages)
    if artefact is not None:
        yield from _check_artefact(artefact, packages)
        yield from _check_settings(settings, artefact)
        yield warning(
            "requests that set `seed` are sampled unseeded: RBLN does not support it",
            "Use temperature 0 where answers must repeat",
        )


def check_packages(packages: Packages) -> Iterator[Finding]:
    """Check the vendor's packages, which every model needs."""
    plugin = packages.versions.get("vllm-rbln")
    if plugin is None:
        return
    minor = ".".join(plugin.split(".")[:2])
    if not packages.rebel:
        yield Finding(
            f"vllm-rbln {plugin} is installed and rebel-compiler is not, so even `import vllm` "
            "fails with `No module named 'rebel'`",
            INSTALL.format(minor) + ", or uninstall vllm-rbln",
        )
    if packages.emulated:
        yield warning(
            "the module `rebel` is not the vendor's: this engine is emulated on the CPU",
            "Nothing of its speed holds for an NPU",
        )
    for name in ("optimum-rbln", "rebel-compiler"):
        other = packages.versions.get(name)
        if other is not None and not same_minor(plugin, other):
            yield Finding(
                f"vllm-rbln {plugin} and {name} {other} are of different releases",
                f"Install one minor version of all three: pip install {name}=={minor}.*",
            )
    releases = releases_of(plugin)
    if releases is not Releases.SUPPORTED:
        is_fork = releases is Releases.FORK
        why = (
            ", which this worker cannot run"
            if is_fork
            else "; this worker was written for 0.12, and never tried with it"
        )
        remedy = "Install vllm-rbln 0.12 and recompile the model"
        yield Finding(f"vllm-rbln {plugin} {releases.value}{why}", remedy, fatal=is_fork)


def _check_artefact(artefact: Artefact, packages: Packages) -> Iterator[Finding]:
    folder = artefact.folder
    if not packages.rbln:
        yield Finding(
            f"{folder} was compiled for RBLN and vllm-rbln is not installed",
            "Install the vendor's packages: docs/how-to/rbln.md",
        )
    if artefact.missing:
        yield Finding(
            f"{folder} lacks {', '.join(artefact.missing)}",
            "Copy the whole folder again, or recompile it",
        )
    if artefact.batch_size == 1:
        yield warning(
            f"{folder} was compiled for batch size 1: one request at a time",
            RECOMPILE + " --batch-size 4",
        )
    compiled_by, present = artefact.optimum_version, packages.versions.get("optimum-rbln")
    if artefact.legacy:
        yield Finding(
            f"{folder} was compiled by optimum-rbln {compiled_by or '0.7 or older'}, whose layout "
            "is not read any more",
            RECOMPILE,
        )
    elif compiled_by and present and not same_minor(compiled_by, present):
        yield Finding(
            f"{folder} was compiled by optimum-rbln {compiled_by}; {present} is installed",
            RECOMPILE,
            fatal=(release_of(compiled_by) < TRANSFORMERS_5)
            != (release_of(present) < TRANSFORMERS_5),
        )


def _check_settings(settings: VllmSettings, artefact: Artefact) -> Iterator[Finding]:
    options = settings.engine_args.options
    yield from check_options(options, artefact, lambda name: f"WARMQ_ENGINE_ARGS: --{name}")
    if settings.stall_timeout_s <= STEP_LIMIT_S:
        yield warning(
            f"WARMQ_STALL_TIMEOUT_S={settings.stall_timeout_s:g} is not longer than the RBLN "
            f"runtime's own time limit of {STEP_LIMIT_S:g} s",
            "A step may take that long: raise WARMQ_STALL_TIMEOUT_S",
        )


def check_options(
    options: Mapping[str, str], artefact: Artefact | None, spelled: Callable[[str], str]
) -> Iterator[Finding]:
    """Check for options of vLLM that RBLN refuses, or that the compiled model determines.

    Args:
        options: values by the option's name, for example max-num-seqs.
        artefact: the compiled model; None if its folder is on another machine.
        spelled: returns an option's name as it is written in its file or variable.
    """
    for name, remedy in REFUSED.items():
        if name in options and not (name.endswith("parallel-size") and options[name] == "1"):
            yield Finding(f"{spelled(name)} is refused on RBLN", remedy)
    if artefact is None:
        return
    chunk = options.get("max-num-batched-tokens")
    if chunk is not None and chunk != str(artefact.prefill_chunk):
        yield Finding(
            f"{spelled('max-num-batched-tokens')} {chunk} conflicts with the compiled prefill "
            f"chunk of {artefact.prefill_chunk} tokens",
            "Leave it out",
        )
    compiled = {
        "max-num-seqs": (artefact.batch_size, "batch size", "--batch-size"),
        "max-model-len": (artefact.max_seq_len, "context length", "--max-seq-len"),
        "block-size": (artefact.block_size, "KV block size", "--partition-len"),
    }
    for name, (value, what, option) in compiled.items():
        if name in options and options[name] != str(value):
            yield warning(
                f"{spelled(name)} {options[name]} has no effect: the compiled {what} is {value}",
                f"Leave it out, or recompile with {option} {options[name]}",
            )
    for name in ("dtype", "enforce-eager"):
        if name in options:
            yield warning(f"{spelled(name)} has no effect on a compiled model", "Leave it out")


def prepare(settings: VllmSettings) -> VllmSettings:
    """Return the settings with the options that the engine needs, and choose its devices.

    Changes environment variables that the vendor's packages read when they are imported.

    Raises:
        SettingsError: names every fatal problem and its remedy.
    """
    packages = installed()
    artefact = read_artefact(settings.model)
    if artefact is None and not packages.rbln:
        return settings
    refuse_fatal(check_rbln(settings, artefact, packages))
    _choose_devices(settings.rbln_devices, packages)
    grace = RBLN_KILL_GRACE_S if settings.kill_grace_s is None else settings.kill_grace_s
    os.environ[ASK_FIRST_ENV] = f"{grace:g}"
    limits = limit_options(artefact, packages.versions["vllm-rbln"]) if artefact else []
    args = EngineArgs(" ".join([settings.engine_args, *limits]))
    return settings.model_copy(update={"engine_args": args, "kill_grace_s": grace})


def _choose_devices(setting: str | None, packages: Packages) -> None:
    """Set the variable that this release reads, and unset the other, if devices are chosen."""
    chosen = setting or os.environ.get(devices.VISIBLE) or os.environ.get(OLD_VISIBLE)
    if chosen is None:
        return
    reads_old = (packages.release("vllm-rbln") or (0, 12)) < (0, 12)
    os.environ.pop(devices.VISIBLE if reads_old else OLD_VISIBLE, None)
    os.environ[OLD_VISIBLE if reads_old else devices.VISIBLE] = chosen


def check_cards(
    chosen_cards: str | None, artefact: Artefact, packages: Packages, preflight: Preflight
) -> None:
    """Add the NPUs and their problems to the preflight. Takes seconds.

    `chosen_cards` is WARMQ_RBLN_DEVICES.
    """
    cards = devices.visible_cards(chosen_cards) if packages.rebel else devices.Cards()
    emulated = " (emulated)" if packages.emulated else ""
    shown = ", ".join(cards.names) or "none"
    needs = f"{artefact.num_devices} x {artefact.npu or 'any card'}"
    preflight.rows["devices"] = f"{shown}{emulated}; the model needs {needs}"
    if packages.rebel:
        preflight.findings += _check_needed_cards(artefact, cards)
    numbers = {int(n) for n in (chosen_cards or "").split(",") if n}
    for card, pids in sorted(devices.holders().items()):
        if not numbers or card in numbers:
            busy = Finding(
                f"/dev/rbln{card} is open in process {', '.join(map(str, sorted(pids)))}",
                "One engine per card: choose another card in WARMQ_RBLN_DEVICES, or stop that "
                "process with SIGTERM",
            )
            preflight.findings.append(busy)
    buckets = "/".join(map(str, artefact.buckets))
    preflight.rows["capacity"] = (
        f"{artefact.batch_size} requests at once of {artefact.max_seq_len} tokens; decode "
        f"batches {buckets}, prefill by {artefact.prefill_chunk}, KV blocks "
        f"{artefact.kv_blocks or '?'}"
    )


def _check_needed_cards(artefact: Artefact, cards: devices.Cards) -> Iterator[Finding]:
    if cards.error:
        yield Finding(
            f"the RBLN runtime cannot be asked for its NPUs: {cards.error}",
            "Run `rbln-smi`: is the driver loaded, are /dev/rbln* given to this container?",
        )
        return
    if len(cards.names) < artefact.num_devices:
        yield Finding(
            f"the model was compiled for {artefact.num_devices} devices and {len(cards.names)} "
            "are visible",
            "Name enough cards in WARMQ_RBLN_DEVICES, or recompile with fewer: --num-devices",
        )
    elif idle := len(cards.names) - artefact.num_devices:
        yield warning(
            f"{idle} of {len(cards.names)} cards stay idle: the model was compiled for "
            f"{artefact.num_devices}",
            "Start another worker with the other cards in WARMQ_RBLN_DEVICES",
        )
    for name in dict.fromkeys(cards.names):
        if artefact.npu is not None and name != artefact.npu:
            yield Finding(
                f"the model was compiled for {artefact.npu} and the card is {name}",
                f"Recompile it: python -m worker.compile MODEL -o DIR --npu {name}",
            )
