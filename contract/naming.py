"""Names that every client sees: task, queues, lists, ids, results; and the nearest known name."""

import hashlib
import re
from collections.abc import Iterable
from difflib import get_close_matches

TASK_NAME = "warmq.generate"
DEFAULT_QUEUE = "warmq"
#: kombu's priority steps and separator (kombu.transport.redis); 0 is highest.
PRIORITY_STEPS = (0, 3, 6, 9)
PRIORITY_SEPARATOR = "\x06\x16"
RESULT_PREFIX = "celery-task-meta-"
LISTEN_CHANNEL = "warmq:listen"
#: Names of listeners to texts; each is one process with one channel.
LISTENER = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: The default tenant; plain Celery clients are `celery` (contract/lua/turns.lua).
DEFAULT_TENANT = "default"

#: Namespace of every request id (uuid5 of the DNS name "warmq.generate").
_NAMESPACE = bytes.fromhex("960db37e6ab45803a58e8309e9e21b67")
#: The first hex digit of the 9th byte, with RFC 9562's variant bits in it.
_VARIANT = {digit: f"{int(digit, 16) & 3 | 8:x}" for digit in "0123456789abcdef"}


def queue_name(model: str | None, default: str = DEFAULT_QUEUE) -> str:
    """Return the queue of a model's requests."""
    return f"{default}.{model}" if model else default


def _step(priority: int) -> int:
    return max(step for step in PRIORITY_STEPS if step <= priority)


def priority_list(queue: str, priority: int) -> str:
    """Return kombu's list key for a priority 0 (highest) to 9."""
    step = _step(priority)
    return queue if step == 0 else f"{queue}{PRIORITY_SEPARATOR}{step}"


def priority_lists(queue: str) -> list[str]:
    """Return the queue's four lists, highest priority first."""
    return [priority_list(queue, step) for step in PRIORITY_STEPS]


def turn_list(queue: str, priority: int, tenant: str, batch_id: str = "") -> str:
    """Return the list of a batch's messages, or of a tenant's batches in order of arrival."""
    return f"{queue}{PRIORITY_SEPARATOR}{_step(priority)}\x06{tenant}\x06{batch_id}"


def turns_key(queue: str, step: int | None = None) -> str:
    """Return the hash of a queue's counters; with a step, the ZSET of tenants waiting there."""
    return f"warmq:turns:{queue}" if step is None else f"warmq:turns:{queue}\x06{step}"


def keys_with_work(queue: str) -> list[str]:
    """Return keys of which one exists whenever a message waits that a worker may take."""
    return [*priority_lists(queue), *(turns_key(queue, step) for step in PRIORITY_STEPS)]


def text_channel(listener: str) -> str:
    """Return the channel of one listener's texts."""
    return f"warmq:text:{listener}"


def _uuid5(name: str) -> str:
    # uuid.uuid5 costs four times as much; the bits are the same (RFC 9562, section 5.5).
    d = hashlib.sha1(_NAMESPACE + name.encode(), usedforsecurity=False).hexdigest()
    return f"{d[:8]}-{d[8:12]}-5{d[13:16]}-{_VARIANT[d[16]]}{d[17:20]}-{d[20:32]}"


def request_id(batch_id: str, custom_id: str) -> str:
    """Return the request id (Celery task id) of a custom_id; the same on every delivery."""
    return _uuid5(f"{batch_id}\0id\0{custom_id}")


def line_request_id(batch_id: str, line: int) -> str:
    """Return the request id of a line that has no usable or unique custom_id."""
    return _uuid5(f"{batch_id}\0line\0{line}")


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Return the closest known name (difflib ratio `alike`, case ignored), '' if none is close."""
    folded = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), folded, 1, alike)
    return folded[near[0]] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` with the closest known name, '' if none is close."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""
