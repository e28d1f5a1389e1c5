"""Finds keys of other programs in Redis: with a wrong type, or lists that no worker reads."""

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from contract import naming
from contract.redis import keys

#: Most seconds of a scan of all keys, and the number of keys that one SCAN examines.
SCAN_S, SCAN_COUNT = 3.0, 5_000


def types_of(queue: str) -> dict[str, str]:
    """Return the keys that a queue's worker needs, with the type that TYPE returns for each."""
    lists = [*naming.priority_lists(queue), keys.suspects_list(queue)]
    rings = (naming.turns_key(queue, step) for step in naming.PRIORITY_STEPS)
    hashes = [
        keys.WORKERS, keys.RETURNS, keys.DEATHS, keys.DEAD, keys.SEQUENCES, keys.SWEEP,
        keys.TENANTS, naming.turns_key(queue),
    ]  # fmt: skip
    sets = [keys.LEASES, keys.REVOKED, keys.BATCHES, keys.RETIRING, *rings]
    named = (("list", lists), ("hash", hashes), ("zset", sets), ("string", [keys.LEASE_SEQ]))
    return {key: kind for kind, of_kind in named for key in of_kind}


def wrong_types(queue: str, found: Mapping[str, bytes]) -> dict[str, str]:
    """Return the keys of a queue whose type in `found` is wrong, with that type."""
    wanted = types_of(queue)
    shown = {key: kind.decode() for key, kind in found.items()}
    return {key: kind for key, kind in shown.items() if kind not in (wanted[key], "none")}


class UnreadList(NamedTuple):
    """A list of requests that no worker reads.

    `option` is kombu's option that gave the list its name, and that the client should not set.
    """

    key: str
    waiting: int
    option: str


def unread_lists(client: Any, queue: str) -> Iterator[UnreadList]:
    """Yield lists of requests with a name similar to a queue's that no worker reads."""
    pattern = re.sub(r"([*?\[\]\\])", r"\\\1", queue)
    cursor, until = None, time.monotonic() + SCAN_S
    while cursor != 0 and time.monotonic() < until:
        cursor, names = client.scan(cursor or 0, f"*{pattern}*", SCAN_COUNT, "list")
        for raw in names:
            name = raw.decode(errors="replace")
            option = _option(name, queue)
            if option and naming.TASK_NAME.encode() in (client.lindex(raw, -1) or b""):
                yield UnreadList(name, client.llen(raw), option)


def _option(name: str, queue: str) -> str:
    """Return kombu's option that gives a list this name; '' if none does."""
    before, found, after = name.partition(queue)
    if not found or name in naming.priority_lists(queue):
        return ""
    own = ("", *(f"{naming.PRIORITY_SEPARATOR}{step}" for step in range(10)))
    if before:
        is_no_queue = before.startswith(("warmq:", "_kombu", naming.RESULT_PREFIX))
        return "global_keyprefix" if after in own and not is_no_queue else ""
    if after in own:
        return "priority_steps"
    return "sep" if re.fullmatch(r"[^A-Za-z0-9.\x06]{1,8}[0-9]", after) else ""
