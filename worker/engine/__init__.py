"""The engine interface: what the drain needs of an engine that generates text.

Adapters raise RequestRejected (the request is wrong), RequestFailed (this attempt failed) and
EngineDead (build a new engine), and no error of their library.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the started engine can take.

    `max_num_seqs` counts all data-parallel replicas. `max_model_len` and `kv_tokens`, the KV
    cache's size, are in tokens. `adapters` are more names that a line's `model` may have. `details`
    is shown by `inspect stats`. `prefix_caching`: prompts share the cache (None: unknown).
    `parses_chats`: a parser takes the reasoning out of a chat's answer, so that it differs from
    `text_so_far`. `one_step`: a request takes one step of the engine, as an embedding does, so all
    slots become free at the same time.
    """

    max_num_seqs: int
    max_model_len: int
    model: str
    adapters: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    kv_tokens: int | None = None
    prefix_caching: bool | None = None
    parses_chats: bool = False
    one_step: bool = False


def multi_sequence_slots(slots: int) -> int:
    """Return how many of an engine's slots requests of several sequences may take in all.

    A sixteenth is left to requests of one sequence, which so soon find a slot.
    """
    return max(1, slots - max(1, slots // 16))


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One checked request: `url` names the endpoint, `body` is its JSON object.

    `trace` has the headers that continue the request's trace, if it is sampled. Preparations that
    go one by one take turns by `tenant`.
    """

    url: str
    body: dict[str, Any]
    trace: Mapping[str, str] | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A response: the endpoint's JSON, and the request's token counts."""

    body: bytes
    prompt_tokens: int
    completion_tokens: int


class Engine(Protocol):
    """An engine that runs many requests at once.

    `grace_s` is the time of its processes between SIGTERM and SIGKILL, in seconds.
    """

    grace_s: float

    def build(self) -> None:
        """Load the model; blocks, in the engine's own thread."""

    async def start(self) -> Capacity:
        """Finish starting on the drain's loop, and return the engine's capacity."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request; cancelling the task aborts it within one engine step."""

    def text_so_far(self, request_id: str) -> Sequence[str]:
        """Return the text of each choice of a running request, before any parser.

        Empty where it is not known. Called only for requests that have a reader.
        """

    def dead(self) -> bool:
        """Return whether it can run nothing any more; cheap, called before every POP."""

    def last_progress(self) -> float:
        """Return time.monotonic() of the latest engine step."""

    def kill(self) -> None:
        """Kill a hung engine, so that all requests in flight fail with EngineDead."""

    def shutdown(self) -> None:
        """Stop and free the device; blocks, in the engine's own thread.

        Takes `grace_s` and a few seconds at most. Errors are logged.
        """


@runtime_checkable
class ReportsWaiting(Protocol):
    """An engine whose `start` or requests may wait for something."""

    def waits_for(self) -> str:
        """Return what it waits for, as "waits for host: connection refused"; '' for nothing.

        Users who wait for results see it, so it holds no secret.
        """


@runtime_checkable
class Attachable(Protocol):
    """An engine in which other processes may run requests too."""

    def new_client(self) -> dict[str, Any] | None:
        """Return what one more process needs to attach, as JSON; None if no more can.

        Called after the start; each call returns another client.
        """

    async def abort_client(self, client: dict[str, Any]) -> int:
        """Abort the requests of a process that died; return their number, of the first replica."""


@runtime_checkable
class CountsCachedTokens(Protocol):
    """An engine that counts the hits of its prefix cache."""

    def cached_prompt_tokens(self) -> int:
        """Return how many prompt tokens it has found in its prefix cache so far."""


@runtime_checkable
class NotifiesText(Protocol):
    """An engine that reports new text; the drain polls the text of other engines."""

    def on_text(self, call: Callable[[], None]) -> None:
        """Set the function to call on the drain's loop when `text_so_far` may return more.

        It is called once for each step of the engine, and returns immediately.
        """
