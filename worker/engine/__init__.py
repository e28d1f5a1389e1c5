"""The one seam for engines: what the drain needs of whatever generates text.

Adapters translate their library's errors into RequestRejected (the request is
wrong), RequestFailed (this attempt failed) and EngineDead (rebuild me).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the running engine can really take, read back from it after start.

    `max_num_seqs` counts all data-parallel replicas; `max_model_len` is in
    tokens; `adapters` are names that a line's `model` may have besides the
    model's own; `details` is shown by `inspect stats`. `kv_tokens` is the size of
    the KV cache and `prefix_caching` whether prompts share it, None where unknown.
    `parses_chats` says that a chat's answer is more than the text of `text_so_far`: a parser takes
    the reasoning out of it. `one_step` says that a request takes one step of the engine, as a text
    does that is embedded: all slots are free at once.
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
    """Return how many of an engine's slots requests of more than one sequence may take in sum.

    The others, a sixteenth, are left to requests of one sequence, so that these soon find one.
    """
    return max(1, slots - max(1, slots // 16))


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One checked request: `url` names the endpoint, `body` its JSON object.

    `trace` are the headers by which the engine continues the request's trace, if that is sampled.
    `tenant` is whose it is: what is done for one request after the other, tenants take turns at.
    """

    url: str
    body: dict[str, Any]
    trace: Mapping[str, str] | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A response: `body` is the endpoint's JSON, token counts are of this request."""

    body: bytes
    prompt_tokens: int
    completion_tokens: int


class Engine(Protocol):
    """An engine that runs many requests at once.

    `grace_s` is what its processes get between being asked to end and being killed, in seconds.
    """

    grace_s: float

    def build(self) -> None:
        """Load the model; blocking, called in the engine's own thread."""

    async def start(self) -> Capacity:
        """Finish starting on the drain's loop and say what the engine can take."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request; cancelling the task aborts it within one engine step."""

    def text_so_far(self, request_id: str) -> Sequence[str]:
        """Return the text each choice of a running request has by now, in the model's own words.

        Empty where nothing can be told. Asked only for requests that somebody listens to.
        """

    def dead(self) -> bool:
        """Return whether it can run nothing any more; cheap, asked before every POP."""

    def last_progress(self) -> float:
        """Return time.monotonic() of the engine's latest step."""

    def kill(self) -> None:
        """Make a hung engine die, so that everything in flight fails with EngineDead."""

    def shutdown(self) -> None:
        """Stop and free the device; blocking, called in the engine's own thread.

        It ends within `grace_s` and a few seconds more. What it raises is logged.
        """


@runtime_checkable
class ReportsWaiting(Protocol):
    """What an engine may have besides, if its `start` or its requests wait for something."""

    def waits_for(self) -> str:
        """Return what it waits for, as "waits for host: connection refused"; '' for nothing.

        Shown to whoever waits for results, so it holds no secret.
        """


@runtime_checkable
class Attachable(Protocol):
    """What an engine may have besides, if other processes may run requests in it too."""

    def new_client(self) -> dict[str, Any] | None:
        """Return what one more process needs to attach to it, as JSON; None if there is no more.

        Asked once it has started. No two processes get the same.
        """

    async def abort_client(self, client: dict[str, Any]) -> int:
        """Abort what a process that died had in the engine; return how many requests that were.

        Of several replicas, how many the first one had.
        """


@runtime_checkable
class CountsCachedTokens(Protocol):
    """What an engine may have besides, if it has a prefix cache and counts what that saves."""

    def cached_prompt_tokens(self) -> int:
        """Return how many prompt tokens it has found in its prefix cache so far."""


@runtime_checkable
class NotifiesText(Protocol):
    """What an engine may have besides, if it knows when there is new text; others are looked at."""

    def on_text(self, call: Callable[[], None]) -> None:
        """Call this on the drain's loop whenever `text_so_far` may return more than before.

        Called once for each step of the engine, not for each request; it returns at once.
        """
