"""What an engine's package exports for configuration, construction and preflight."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from worker.engine import Engine
from worker.machine.finding import Finding
from worker.settings import WorkerSettings


@dataclass(slots=True)
class Preflight:
    """The table, and the problems, that `python -m worker.check` shows of an engine.

    `rows` are shown in their order; the tool adds its own (answers, memory, Redis).
    """

    rows: dict[str, str] = field(default_factory=dict)
    found: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine's settings and functions; one named `module:name` is imported when needed.

    `make` returns the engine for its settings, not built yet. It runs in the engine's own thread,
    refuses what cannot work with a SettingsError, and is the first to import the engine's library.

    `python -m worker.check` calls `check`, which imports no library and starts nothing. If that
    found nothing fatal it calls `rehearse`: the start's own code, but loading no model, waiting for
    nobody, and ending in seconds. It raises the start's SettingsError, may add to what `check`
    found, and leaves nothing behind. By default the engine is made and shut down, not built.

    `attach` is for engines that other processes may use (worker.engine.Attachable): called with the
    settings and a client of a running engine, it returns an engine, not built yet, that runs
    requests in that one. `front_ends` returns how many processes feed it by default.
    """

    settings: type[WorkerSettings]
    make: Callable[[Any], Engine] | str
    check: Callable[[Any], Preflight] = lambda settings: Preflight()
    rehearse: Callable[[Any, Preflight], None] | str | None = None
    attach: Callable[[Any, dict[str, Any]], Engine] | str | None = None
    front_ends: Callable[[Any], int] = lambda settings: 1


def answer_limit(most: int, source: str = "WARMQ_DEFAULT_MAX_TOKENS") -> str:
    """Describe the default limit of an answer's tokens, and its source."""
    return f"at most {most} tokens where a line has no max_tokens ({source})"
