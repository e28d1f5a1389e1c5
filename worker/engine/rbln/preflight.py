"""What `python -m worker.check` shows of a compiled model and of the NPUs it runs on."""

from __future__ import annotations

from collections.abc import Iterator

from worker.engine.rbln.model import Artefact
from worker.engine.spec import Preflight
from worker.machine import devices
from worker.machine.finding import Finding
from worker.machine.packages import Packages


def describe_compiler(artefact: Artefact) -> str:
    """Say what the model was compiled to, and by which release."""
    attention = f"flash, blocks of {artefact.block_size}" if artefact.flash_attention else "eager"
    return (
        f"{artefact.folder}: {artefact.model_class}, compiled by optimum-rbln "
        f"{artefact.optimum_version or '?'}, {attention} attention"
    )


def describe_capacity(artefact: Artefact) -> str:
    """Say how much runs at once, and how long a request may be."""
    buckets = "/".join(map(str, artefact.buckets))
    return (
        f"{artefact.batch_size} requests at once of {artefact.max_seq_len} tokens; decode "
        f"batches {buckets}, prefill by {artefact.prefill_chunk}, KV blocks "
        f"{artefact.kv_blocks or '?'}"
    )


def look_at_cards(
    wanted: str | None, artefact: Artefact, packages: Packages, seen: Preflight
) -> None:
    """Add the NPUs to the table, and what is wrong with them; seconds.

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
        if not mine or card in mine:
            seen.found.append(busy(card, pids))


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


def busy(card: int, pids: set[int]) -> Finding:
    """Say who holds a card."""
    who = ", ".join(map(str, sorted(pids)))
    return Finding(
        f"/dev/rbln{card} is open in process {who}",
        "One engine per card: choose another in WARMQ_RBLN_DEVICES, or stop it with SIGTERM",
    )
