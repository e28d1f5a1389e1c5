"""Defines EngineSpec: the settings and functions that an engine's package exports."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from worker.engine import Engine
from worker.machine.finding import Finding
from worker.settings import WorkerSettings


@dataclass(slots=True)
class Preflight:
    """The rows and problems of an engine that `python -m worker.check` shows.

    `rows` are shown in this order, followed by the tool's own rows (answers, memory, Redis).
    """

    rows: dict[str, str] = field(default_factory=dict)
    found: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings and functions of one engine.

    A function may be given as "module:name"; it is imported when it is needed.

    `make` gets the settings and returns an engine, which the caller has to build. It runs in the
    engine's own thread, and is the first to import the engine's library. It raises SettingsError
    for settings with which the engine cannot work.

    `python -m worker.check` calls `check`, which imports no library and starts nothing. If `check`
    finds nothing fatal, the tool calls `rehearse`: it runs the code of a start, but loads no model,
    waits for no server and ends within seconds. It raises the same SettingsError as the start, may
    add to the findings, and leaves nothing behind. By default the tool calls `make`, and then the
    engine's `shutdown`.

    `attach` is for engines that other processes can use (worker.engine.Attachable). It gets the
    settings and a client of a running engine, and returns an engine (to build) that runs requests
    in the running one. `front_ends` returns the default number of processes that send requests to
    the engine.
    """

    settings: type[WorkerSettings]
    make: Callable[[Any], Engine] | str
    check: Callable[[Any], Preflight] = lambda settings: Preflight()
    rehearse: Callable[[Any, Preflight], None] | str | None = None
    attach: Callable[[Any, dict[str, Any]], Engine] | str | None = None
    front_ends: Callable[[Any], int] = lambda settings: 1


def answer_limit(most: int, source: str = "WARMQ_DEFAULT_MAX_TOKENS") -> str:
    """Describe the default limit of output tokens, and the setting that it is from."""
    return f"at most {most} tokens where a line has no max_tokens ({source})"
