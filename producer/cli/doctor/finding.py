"""What a look at one thing has found, without the words for it."""

from dataclasses import dataclass
from typing import Any, Literal

#: A problem stops the work, or will; a remark does not.
Level = Literal["ok", "remark", "problem"]
Area = Literal["redis", "workers", "queue", "disk", "settings"]
#: The same words for ever: scripts look at them.
Code = Literal[
    "aof_off", "aof_on", "clock", "clock_differs", "cluster", "dead_letters", "disk", "disk_full",
    "disk_low", "evicts", "evicts_nothing", "folder_unwritable", "forbidden", "memory",
    "memory_full", "memory_high", "memory_unlimited", "no_dead_letters", "no_open_batch",
    "no_worker", "not_looked", "open_batch", "other_policy", "queue", "queue_unserved",
    "queue_unused", "records", "records_high", "redis_unusable", "redis_writes_fail", "replica",
    "rights", "rights_missing", "sentinel", "server", "server_too_old", "settings",
    "settings_wrong", "suspects", "unread_list", "version", "worker", "worker_degraded",
    "worker_draining", "worker_newer", "worker_older", "worker_other_version", "worker_silent",
    "worker_starting", "worker_stopped", "worker_waits", "wrong_type",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `facts` are what its words are made of: text, numbers, lists of text.

    Names that end in `_bytes` and `_s` are bytes and seconds.
    """

    area: Area
    code: Code
    level: Level
    facts: dict[str, Any]


def ok(area: Area, code: Code, **facts: Any) -> Finding:
    """Return that something is as it should be."""
    return Finding(area, code, "ok", facts)


def remark(area: Area, code: Code, **facts: Any) -> Finding:
    """Return what somebody may want to change, though the work goes on."""
    return Finding(area, code, "remark", facts)


def problem(area: Area, code: Code, **facts: Any) -> Finding:
    """Return what stops the work, or will."""
    return Finding(area, code, "problem", facts)
