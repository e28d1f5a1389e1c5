"""Judges a Redis server by what it tells of itself, and its clock."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from producer.cli.doctor.finding import Finding, ok, problem, remark
from producer.cli.gateway_records import Held

#: The oldest server whose commands warmq's scripts know.
OLDEST = (6, 2)
#: From which difference on clocks are told of, in seconds.
CLOCK_S = 5.0
#: From which part of what a tenant may keep in Redis on it is told as high.
RECORDS_HIGH = 0.8
#: What INFO tells of the last write to disk, and to which file it was.
_LAST_WRITES = {
    "aof_last_write_status": "append-only file",
    "aof_last_bgrewrite_status": "append-only file (its rewrite)",
    "rdb_last_bgsave_status": "snapshot",
}


def judge(info: Mapping[str, Any], url: str, high_water: float) -> Iterator[Finding]:
    """Yield what INFO tells: version, mode, role, persistence, memory."""
    yield version(info, url)
    if mode(info) == "cluster":
        yield problem("redis", "cluster")
    if info.get("role") in ("slave", "replica"):
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        yield problem("redis", "replica", primary=primary)
    if info.get("aof_enabled"):
        yield ok("redis", "aof_on")
    else:
        yield remark("redis", "aof_off")
    yield eviction(info)
    yield memory(info, high_water)


def mode(info: Mapping[str, Any]) -> str:
    """Return standalone, cluster or sentinel; Valkey has its own name for the field."""
    return str(info.get("redis_mode") or info.get("server_mode") or "standalone")


def version(info: Mapping[str, Any], url: str) -> Finding:
    """Say whether the server is new enough; Valkey tells a Redis' version besides its own."""
    number = str(info.get("redis_version", "0"))
    name, shown = "Redis", number
    if "valkey_version" in info:
        name, shown = "Valkey", str(info["valkey_version"])
    parts = tuple(int(part) for part in re.findall(r"\d+", number)[:2])
    facts = {"name": name, "version": shown, "url": url}
    if parts < OLDEST:
        return problem("redis", "server_too_old", **facts)
    return ok("redis", "server", **facts)


def eviction(info: Mapping[str, Any]) -> Finding:
    """Say whether Redis may drop what it holds."""
    policy, limit = str(info.get("maxmemory_policy", "unknown")), int(info.get("maxmemory", 0))
    if policy == "noeviction":
        return ok("redis", "evicts_nothing")
    if limit:
        return problem("redis", "evicts", policy=policy)
    return remark("redis", "other_policy", policy=policy)


def memory(info: Mapping[str, Any], high_water: float) -> Finding:
    """Say how full Redis is; `high_water` is the share of maxmemory above which submit waits."""
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        return remark("redis", "memory_unlimited", used_bytes=used)
    facts = {"used_bytes": used, "limit_bytes": limit, "percent": round(100 * used / limit)}
    if used >= limit:
        return problem("redis", "memory_full", **facts)
    if used >= limit * high_water:
        return remark("redis", "memory_high", **facts)
    return ok("redis", "memory", **facts)


def records(held: Held, most: int) -> Finding:
    """Say what a tenant of a gateway keeps in Redis; `most` is where gateways refuse more."""
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


def last_writes(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield each file that Redis could not write to the last time it tried."""
    for field, what in _LAST_WRITES.items():
        if info.get(field, "ok") != "ok":
            yield problem("disk", "redis_writes_fail", what=what)


def clocks(before_s: float, redis_s: float, after_s: float) -> Finding:
    """Compare the clocks: this machine's just before and after Redis was asked for its own."""
    ahead_s = redis_s - (before_s + after_s) / 2
    unknown_s = abs(after_s - before_s) / 2  # where between the two Redis looked at its clock
    if abs(ahead_s) - unknown_s <= CLOCK_S:
        return ok("redis", "clock", within_s=CLOCK_S)
    direction = "ahead of" if ahead_s > 0 else "behind"
    return remark("redis", "clock_differs", apart_s=abs(ahead_s), direction=direction)
