"""Defines the interface that every engine implements, and that the drain uses.

An engine raises RequestRejected (the request is wrong), RequestFailed (this attempt failed),
RequestReturned (it goes back to the queue) or EngineDead (a new engine must be built), and no error
of the library that it uses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct


class RequestReturned(Exception):
    """The engine has ended a request that ran: it goes back to the queue, no death is counted."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits and properties of an engine that has started.

    `max_num_seqs` is the number of sequences that run at once, in all data-parallel replicas.
    `max_model_len` and `kv_tokens` (the size of the KV cache) are in tokens. `adapters` are names
    that the `model` of a request may have in addition to `model`; `on_demand` returns the
    names of adapters that are loaded when a request names them. `inspect stats` shows `details`.
    `prefix_caching`: prompts share the KV cache of equal prefixes (None: unknown). `parses_chats`:
    a parser removes the reasoning from a chat's answer, but not from `text_so_far`.
    `one_step`: each request takes one step of the engine, for example an embedding, so that all
    slots become free at the same time. `identity` returns a text with all that decides answers
    apart from the bodies: model, configuration, release; '' while that is unknown: then no answer
    is reused.
    """

    max_num_seqs: int
    max_model_len: int
    model: str
    adapters: tuple[str, ...] = ()
    on_demand: Callable[[], Sequence[str]] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    kv_tokens: int | None = None
    prefix_caching: bool | None = None
    parses_chats: bool = False
    one_step: bool = False
    identity: Callable[[], str] | None = None


def multi_sequence_slots(slots: int) -> int:
    """Return the number of slots that requests of several sequences may take in total.

    A sixteenth of the slots is reserved for requests of one sequence, so that they wait less.
    """
    return max(1, slots - max(1, slots // 16))


# Each request makes an EngineRequest and a Completion: frozen dataclasses take 0.8 µs, Structs 0.1.
class EngineRequest(Struct, frozen=True):
    """A checked request: `url` is the endpoint's path, `body` its JSON object.

    `trace` has the HTTP headers that continue the request's trace, if the trace is sampled. Where
    the engine prepares requests one after the other, the tenants take turns, by `tenant`. Of the
    requests that wait in the engine, those with the lowest `priority` start first (kombu's step: 0,
    3, 6 or 9). `listened`: somebody reads the answer's text while it is written.
    """

    url: str
    body: dict[str, Any]
    trace: Mapping[str, str] | None = None
    tenant: str = ""
    priority: int = 0
    listened: bool = False


class Completion(Struct, frozen=True):
    """An answer: the endpoint's JSON, and the numbers of tokens of prompt and output."""

    body: bytes
    prompt_tokens: int
    completion_tokens: int


class Engine(Protocol):
    """An engine that runs many requests at once.

    `grace_s` is the number of seconds between SIGTERM and SIGKILL for the engine's processes.
    """

    grace_s: float

    def build(self) -> None:
        """Load the model. Blocks; called in the engine's own thread."""

    async def start(self) -> Capacity:
        """Finish starting on the drain's loop, and return the engine's capacity."""

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        """Run one request. Cancelling the task aborts the request within one engine step."""

    def text_so_far(self, request_id: str) -> Sequence[str]:
        """Return the text of each choice of a running request, before any parser.

        Empty if the engine does not know the text. Called only while a client reads the text.
        """

    def dead(self) -> bool:
        """Return whether the engine can run no more requests. Fast: called before each POP."""

    def last_progress(self) -> float:
        """Return time.monotonic() of the latest engine step."""

    def kill(self) -> None:
        """Kill a hung engine, so that all requests in flight fail with EngineDead."""

    def shutdown(self) -> None:
        """Stop the engine and free its device. Blocks; called in the engine's own thread.

        Takes at most `grace_s` and a few seconds. Logs errors instead of raising them.
        """


@runtime_checkable
class ReportsWaiting(Protocol):
    """An engine whose `start` or requests may have to wait for a server."""

    def waits_for(self) -> str:
        """Return for example "waits for host: connection refused"; '' if it waits for nothing.

        Users who wait for results see this text, so it must not contain a secret.
        """


@runtime_checkable
class Attachable(Protocol):
    """An engine to which other processes can attach, to run requests in it."""

    def new_client(self) -> dict[str, Any] | None:
        """Return the JSON that one more process needs to attach; None if no further one can.

        Called after `start`. Each call returns the JSON of a new client.
        """

    async def abort_client(self, client: dict[str, Any]) -> int:
        """Abort the requests of an attached process that died; `client` is its JSON.

        Returns the number of these requests in the first data-parallel replica.
        """


@runtime_checkable
class CanSleep(Protocol):
    """An engine that can free its device's memory while its processes live on.

    `sleep` and `wake_up` are called while the engine has no request.
    """

    async def sleep(self) -> None:
        """Free the device's memory. The engine runs no request until `wake_up`."""

    async def wake_up(self) -> None:
        """Take the device's memory again, so that requests can run."""

    def device_used(self) -> int | None:
        """Return the bytes of the device's memory that are in use; None if it cannot be read."""

    async def answer_fixed_question(self) -> str:
        """Run a fixed short request, and return the part of its answer that never varies."""


@runtime_checkable
class CountsCachedTokens(Protocol):
    """An engine that counts the prompt tokens found in its prefix cache."""

    def cached_prompt_tokens(self) -> int:
        """Return the number of prompt tokens found in the prefix cache since the start."""


@runtime_checkable
class NotifiesText(Protocol):
    """An engine that reports new text. The drain polls engines without this method."""

    def on_text(self, call: Callable[[], None]) -> None:
        """Set the function to call on the drain's loop when `text_so_far` may return more.

        The engine calls the function once for each step; the function returns immediately.
        """
