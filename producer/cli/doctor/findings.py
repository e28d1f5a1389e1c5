"""Findings of `producer doctor`, and those about Redis itself: its INFO and its clock."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from producer.redis import TenantUsage

#: A problem stops the work, or will; a remark does not.
Level = Literal["ok", "remark", "problem"]
Area = Literal["redis", "workers", "queue", "disk", "settings"]
#: Scripts match these codes: they never change.
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
#: The oldest server that has all commands of warmq's scripts.
OLDEST_SERVER = (6, 2)
#: Clocks that differ by no more than this many seconds agree.
CLOCK_S = 5.0
#: Share of a tenant's limit for records from which it counts as high.
RECORDS_HIGH = 0.8
#: INFO's fields about the last write to disk, and the file that each means.
_LAST_WRITES = {
    "aof_last_write_status": "append-only file",
    "aof_last_bgrewrite_status": "append-only file (its rewrite)",
    "rdb_last_bgsave_status": "snapshot",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. Facts named `..._bytes` and `..._s` are bytes and seconds."""

    area: Area
    code: Code
    level: Level
    facts: dict[str, Any]


def ok(area: Area, code: Code, **facts: Any) -> Finding:
    """Return a finding that needs no action."""
    return Finding(area, code, "ok", facts)


def remark(area: Area, code: Code, **facts: Any) -> Finding:
    """Return a finding that may need a change, though work goes on."""
    return Finding(area, code, "remark", facts)


def problem(area: Area, code: Code, **facts: Any) -> Finding:
    """Return a finding that stops the work, or will."""
    return Finding(area, code, "problem", facts)


def check_server(info: Mapping[str, Any], url: str, high_water: float) -> Iterator[Finding]:
    """Yield findings from INFO: version, mode, role, persistence, memory."""
    yield server_version(info, url)
    if server_mode(info) == "cluster":
        yield problem("redis", "cluster")
    if info.get("role") in ("slave", "replica"):
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        yield problem("redis", "replica", primary=primary)
    yield ok("redis", "aof_on") if info.get("aof_enabled") else remark("redis", "aof_off")
    yield _eviction(info)
    yield _memory(info, high_water)
    yield from last_writes(info)


def server_mode(info: Mapping[str, Any]) -> str:
    """Return standalone, cluster or sentinel; Valkey names the field differently."""
    return str(info.get("redis_mode") or info.get("server_mode") or "standalone")


def server_version(info: Mapping[str, Any], url: str) -> Finding:
    """Check the server's version; Valkey reports a compatible Redis version too."""
    compatible = str(info.get("redis_version", "0"))
    valkey = info.get("valkey_version")
    facts = {"name": "Valkey" if valkey else "Redis", "version": valkey or compatible, "url": url}
    if tuple(map(int, re.findall(r"\d+", compatible)[:2])) < OLDEST_SERVER:
        return problem("redis", "server_too_old", **facts)
    return ok("redis", "server", **facts)


def _eviction(info: Mapping[str, Any]) -> Finding:
    policy = str(info.get("maxmemory_policy", "unknown"))
    if policy == "noeviction":
        return ok("redis", "evicts_nothing")
    if int(info.get("maxmemory", 0)):
        return problem("redis", "evicts", policy=policy)
    return remark("redis", "other_policy", policy=policy)


def _memory(info: Mapping[str, Any], high_water: float) -> Finding:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        return remark("redis", "memory_unlimited", used_bytes=used)
    facts = {"used_bytes": used, "limit_bytes": limit, "percent": round(100 * used / limit)}
    if used >= limit:
        return problem("redis", "memory_full", **facts)
    if used >= limit * high_water:
        return remark("redis", "memory_high", **facts)
    return ok("redis", "memory", **facts)


def last_writes(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a problem for each file that Redis failed to write the last time it tried."""
    for field, what in _LAST_WRITES.items():
        if info.get(field, "ok") != "ok":
            yield problem("disk", "redis_writes_fail", what=what)


def clocks(before_s: float, redis_s: float, after_s: float) -> Finding:
    """Compare Redis' clock with this machine's, read before and after the call to Redis."""
    ahead_s = redis_s - (before_s + after_s) / 2
    uncertain_s = abs(after_s - before_s) / 2
    if abs(ahead_s) - uncertain_s <= CLOCK_S:
        return ok("redis", "clock", within_s=CLOCK_S)
    direction = "ahead of" if ahead_s > 0 else "behind"
    return remark("redis", "clock_differs", apart_s=abs(ahead_s), direction=direction)


def tenant_records(held: TenantUsage, most: int) -> Finding:
    """Check the records of a gateway's tenant; gateways refuse more than `most` bytes."""
    facts = {
        "tenant": held.tenant,
        "held_bytes": held.bytes,
        "most_bytes": most,
        "kinds": [f"{count} {kind}" for kind, count in held.kinds.items()],
        "sampled": held.sampled,
    }
    if held.bytes >= most * RECORDS_HIGH:
        return remark("redis", "records_high", **facts)
    return ok("redis", "records", **facts)
