"""Makes the names that clients see: those of the task, queues, lists and results; request ids.

It also finds the known name that is most similar to a misspelt one.
"""

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterable
from difflib import get_close_matches

#: The name of the Celery task that all requests call.
TASK_NAME = "warmq.generate"
#: The default of WARMQ_QUEUE.
DEFAULT_QUEUE = "warmq"
#: kombu's priority steps (kombu.transport.redis); 0 is the highest priority.
PRIORITY_STEPS = (0, 3, 6, 9)
#: kombu's separator of a queue's name and a priority step in a list's name.
PRIORITY_SEPARATOR = "\x06\x16"
#: The first characters of the keys in which Celery's Redis backend has results.
RESULT_PREFIX = "celery-task-meta-"
#: The channel of listeners' subscriptions (contract/streaming.py).
LISTEN_CHANNEL = "warmq:listen"
#: The allowed names of listeners; a listener is a process that reads requests' running text.
LISTENER = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: The default tenant; requests of plain Celery clients have the tenant `celery`.
DEFAULT_TENANT = "default"

#: The namespace of the UUIDs that are request ids: uuid5 of the DNS name "warmq.generate".
_NAMESPACE = bytes.fromhex("960db37e6ab45803a58e8309e9e21b67")
#: The first hex digit of a UUID's 9th byte, by the hash's digit, with RFC 9562's variant bits.
_VARIANT = {digit: f"{int(digit, 16) & 3 | 8:x}" for digit in "0123456789abcdef"}


def queue_name(model: str | None, default: str = DEFAULT_QUEUE) -> str:
    """Return the name of the queue for a model's requests."""
    return f"{default}.{model}" if model else default


def priority_step(priority: float) -> int:
    """Return kombu's step of a priority, 0 (highest) to 9."""
    return PRIORITY_STEPS[bisect_right(PRIORITY_STEPS, priority) - 1]


def priority_list(queue: str, priority: int) -> str:
    """Return the key of kombu's list for a priority, 0 (highest) to 9."""
    step = priority_step(priority)
    return queue if step == 0 else f"{queue}{PRIORITY_SEPARATOR}{step}"


def priority_lists(queue: str) -> list[str]:
    """Return the keys of kombu's four lists of a queue, highest priority first."""
    return [priority_list(queue, step) for step in PRIORITY_STEPS]


def turn_list(queue: str, priority: int, tenant: str, batch_id: str = "") -> str:
    """Return the key of the list of a batch's messages.

    Without `batch_id` it is the list of the tenant's messages that are served in order of arrival.
    """
    return f"{queue}{PRIORITY_SEPARATOR}{priority_step(priority)}\x06{tenant}\x06{batch_id}"


def list_in(queue: str, list_key: str) -> str:
    """Return the list of the same priority, tenant and batch in another queue."""
    return f"{queue}{PRIORITY_SEPARATOR}{list_key.rpartition(PRIORITY_SEPARATOR)[2]}"


def turns_key(queue: str, step: int | None = None) -> str:
    """Return the key of a queue's counters, or of the ZSET of tenants that wait at a step."""
    return f"warmq:turns:{queue}" if step is None else f"warmq:turns:{queue}\x06{step}"


def deadlines_key(queue: str) -> str:
    """Return the key of the ZSET of a queue's lists of batches with a deadline."""
    return f"{turns_key(queue)}:deadlines"


def keys_with_work(queue: str) -> list[str]:
    """Return the keys of which one exists whenever a worker may take a message."""
    return [*priority_lists(queue), *(turns_key(queue, step) for step in PRIORITY_STEPS)]


def text_channel(listener: str) -> str:
    """Return the pub/sub channel on which a listener receives running text."""
    return f"warmq:text:{listener}"


def _uuid5(name: str) -> str:
    # The bits are those of uuid.uuid5 (RFC 9562, section 5.5), which takes four times as long.
    digits = hashlib.sha1(_NAMESPACE + name.encode(), usedforsecurity=False).hexdigest()
    third, fourth = f"5{digits[13:16]}", f"{_VARIANT[digits[16]]}{digits[17:20]}"
    return f"{digits[:8]}-{digits[8:12]}-{third}-{fourth}-{digits[20:32]}"


def request_id(batch_id: str, custom_id: str) -> str:
    """Return the request id (Celery's task id) of a custom_id in a batch."""
    return _uuid5(f"{batch_id}\0id\0{custom_id}")


def line_request_id(batch_id: str, line: int) -> str:
    """Return the request id of a line whose custom_id is missing, invalid or not unique."""
    return _uuid5(f"{batch_id}\0line\0{line}")


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Return the most similar known name, or ''; `alike` is the least ratio of difflib."""
    folded = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), folded, 1, alike)
    return folded[near[0]] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` with the most similar known name, '' if none is similar."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""
