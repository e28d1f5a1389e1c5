"""Defines EngineSpec: the settings and functions that an engine's package exports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.engine import Engine
from worker.machine.finding import Finding
from worker.settings import WorkerSettings


@dataclass(slots=True)
class Preflight:
    """The rows and problems of an engine that `python -m worker.check` shows.

    `rows` are shown in the dict's order, followed by the tool's own rows (answers, memory, Redis).
    """

    rows: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sleep:
    """How an engine can sleep while another model has the device (worker.engine.CanSleep).

    The engine must be made with `settings`. Asleep it has about `host_bytes` of the machine's
    memory and at most `device_bytes` of its devices'. `why` describes both for the log.
    """

    settings: WorkerSettings
    host_bytes: int
    device_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The settings and functions of one engine.

    A function may be given as "module:name"; it is imported when it is needed.

    `make` gets the settings and returns an engine, not built yet. It runs in the engine's own
    thread, and is the first to import the engine's library. It raises SettingsError for settings
    with which the engine cannot work.

    `python -m worker.check` calls `check`, which imports no library and starts nothing. If `check`
    finds nothing fatal, the tool calls `dry_run`: it runs the code of a start, but loads no model,
    waits for no server and ends within seconds. It raises the same SettingsError as the start, may
    add to the findings, and leaves nothing behind. By default the tool calls `make`, and then the
    engine's `shutdown`.

    `attach` is for engines that other processes can use (worker.engine.Attachable). It gets the
    settings and a client of a running engine, and returns an engine, not built yet, that runs
    requests in the running one. `front_ends` returns the default number of processes that send
    requests to the engine.

    `sleep` gets the settings and the number of other models that may sleep on the same devices. It
    returns how the engine can sleep, or the reason why it cannot.

    `adapters` gets the settings and returns the names of the adapters that an engine would serve
    with them. It is called while other models are loaded, reads files and may raise OSError.

    `together` gets the settings of several models, and returns whether their engines can run at the
    same time in this process, and why.
    """

    settings: type[WorkerSettings]
    make: Callable[[Any], Engine] | str
    check: Callable[[Any], Preflight] = lambda settings: Preflight()
    dry_run: Callable[[Any, Preflight], None] | str | None = None
    attach: Callable[[Any, dict[str, Any]], Engine] | str | None = None
    front_ends: Callable[[Any], int] = lambda settings: 1
    adapters: Callable[[Any], Sequence[str]] = lambda settings: ()
    together: Callable[[Sequence[Any]], tuple[bool, str]] = lambda settings: (
        False,
        f"the engine {settings[0].engine} is loaded once",
    )
    sleep: Callable[[Any, int], Sleep | str] = lambda settings, more: (
        f"the engine {settings.engine} does not sleep"
    )


def answer_limit(most: int, source: str = "WARMQ_DEFAULT_MAX_TOKENS") -> str:
    """Describe the default limit of output tokens, and the setting that it is from."""
    return f"at most {most} tokens where a line has no max_tokens ({source})"
