"""What an engine's package exports: how it is configured, made, and looked at before it starts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from worker.engine import Engine
from worker.machine.finding import Finding
from worker.settings import WorkerSettings


@dataclass(slots=True)
class Preflight:
    """What `python -m worker.check` shows of an engine that is not started: a table and problems.

    `rows` are shown in their order; the tool adds what it knows itself (answers, memory, Redis).
    """

    rows: dict[str, str] = field(default_factory=dict)
    found: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine; `settings` is what `make` and `check` are called with.

    `make` returns the engine, not built yet; as `module:name` it is imported when it is needed.
    It runs in the engine's own thread, refuses what cannot work with a SettingsError, and is the
    first that may import the engine's library.

    `python -m worker.check` calls `check`, which imports no library and starts nothing, and if that
    found nothing fatal `rehearse`: as much of a start as loads no model, waits for nobody and ends
    in seconds, by the start's own code, so that whatever a start refuses is refused here too. It
    raises the start's SettingsError, may add to what `check` found, and leaves nothing behind. By
    default it makes the engine and shuts it down, not built.

    `attach` is for engines that may be shared (worker.engine.Attachable): called with
    the settings and a client of a running engine it returns an engine, not built yet, that runs
    requests in that one.
    `front_ends` says how many processes should feed it where no setting says it.
    """

    settings: type[WorkerSettings]
    make: Callable[[Any], Engine] | str
    check: Callable[[Any], Preflight] = lambda settings: Preflight()
    rehearse: Callable[[Any, Preflight], None] | str | None = None
    attach: Callable[[Any, dict[str, Any]], Engine] | str | None = None
    front_ends: Callable[[Any], int] = lambda settings: 1


def answers(most: int, who: str = "WARMQ_DEFAULT_MAX_TOKENS") -> str:
    """Say how many tokens a line may write that does not say it itself, and who says so."""
    return f"at most {most} tokens where a line has no max_tokens ({who})"
