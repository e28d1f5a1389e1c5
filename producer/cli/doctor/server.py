"""Checks a Redis server: version, mode, persistence, memory, clock, rights."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from contract.redis.batches import BatchStore
from producer.cli.doctor.finding import Finding, listed, of_stall, ok, problem, remark
from producer.cli.progress import counted
from producer.cli.show import size_text
from producer.redis import TenantUsage, missing_permissions
from producer.stalls import memory_stall

#: Version of the oldest Redis that has all commands of warmq's scripts.
OLDEST_SERVER = (6, 2)
#: Most seconds by which two clocks that agree may differ.
CLOCK_S = 5.0
#: Share of a tenant's limit for records above which a remark is printed.
RECORDS_HIGH = 0.8
#: Fields of INFO about the last write to disk, and the file that each is about.
_LAST_WRITES = {
    "aof_last_write_status": "append-only file",
    "aof_last_bgrewrite_status": "append-only file (its rewrite)",
    "rdb_last_bgsave_status": "snapshot",
}
_RIGHTS_REMEDY = "give it the rights that docs/how-to/security.md lists (ACL SETUSER)"


def check_server(info: Mapping[str, Any], url: str, high_water: float) -> Iterator[Finding]:
    """Yield findings from INFO: version, mode, role, persistence, memory."""
    yield check_version(info, url)
    if server_mode(info) == "cluster":
        remedy = (
            "use one without `cluster-enabled yes`: warmq's scripts touch keys of several slots"
        )
        yield problem("redis", "cluster", "this Redis runs in cluster mode", remedy)
    if info.get("role") in ("slave", "replica"):
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        remedy = f"point WARMQ_REDIS_URL at its primary, {primary}, or use sentinel://"
        text = "this Redis is a replica and takes no writes"
        yield problem("redis", "replica", text, remedy, primary=primary)
    if info.get("aof_enabled"):
        text = (
            "the append-only file is on; docs/how-to/redis.md states what a crash of Redis can lose"
        )
        yield ok("redis", "aof_on", text)
    else:
        yield remark(
            "redis", "aof_off",
            "the append-only file is off, so a crash or restart of Redis loses everything since "
            "its last snapshot, queue and results",
            "set `appendonly yes` in redis.conf for more than a trial",
        )  # fmt: skip
    yield _check_eviction(info)
    yield _check_memory(info, high_water)
    yield from check_last_writes(info)


def server_mode(info: Mapping[str, Any]) -> str:
    """Return standalone, cluster or sentinel; the field has another name in Valkey."""
    return str(info.get("redis_mode") or info.get("server_mode") or "standalone")


def check_version(info: Mapping[str, Any], url: str) -> Finding:
    """Check the server's version; Valkey reports a compatible Redis version too."""
    compatible = str(info.get("redis_version", "0"))
    valkey = info.get("valkey_version")
    name, version = ("Valkey", valkey) if valkey else ("Redis", compatible)
    text, facts = f"{name} {version} at {url}", {"name": name, "version": version, "url": url}
    if tuple(map(int, re.findall(r"\d+", compatible)[:2])) < OLDEST_SERVER:
        remedy = "warmq needs Redis 6.2 or newer, or Valkey"
        return problem("redis", "server_too_old", f"{text} is too old", remedy, **facts)
    return ok("redis", "server", text, **facts)


def _check_eviction(info: Mapping[str, Any]) -> Finding:
    policy = str(info.get("maxmemory_policy", "unknown"))
    text, remedy = f"maxmemory-policy is {policy}", "set `maxmemory-policy noeviction`"
    if policy == "noeviction":
        return ok("redis", "evicts_nothing", f"{text}, so nothing is dropped")
    if int(info.get("maxmemory", 0)):
        text += ", so a full Redis silently drops results and whole batches"
        remedy += " in redis.conf, or by CONFIG SET"
        return problem("redis", "evicts", text, remedy, policy=policy)
    text += ", which has no effect while maxmemory is 0"
    return remark(
        "redis", "other_policy", text, f"{remedy} before you set maxmemory", policy=policy
    )


def _check_memory(info: Mapping[str, Any], high_water: float) -> Finding:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        text = f"{size_text(used)} used; maxmemory is not set, so Redis can fill all memory"
        remedy = "set maxmemory (docs/how-to/redis.md)"
        return remark("redis", "memory_unlimited", text, remedy, used_bytes=used)
    if stall := memory_stall(used, limit, high_water):
        return of_stall("redis", stall)
    percent = round(100 * used / limit)
    text = f"{size_text(used)} of maxmemory {size_text(limit)} used ({percent} %)"
    return ok("redis", "memory", text, used_bytes=used, limit_bytes=limit, percent=percent)


def check_last_writes(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a problem for each file that Redis failed to write the last time it tried."""
    remedy = "check Redis's log and the free space of its disk; Redis may refuse all writes"
    for field, what in _LAST_WRITES.items():
        if info.get(field, "ok") != "ok":
            text = f"Redis could not write its {what} the last time it tried"
            yield problem("disk", "redis_writes_fail", text, remedy, what=what)


def check_clocks(before_s: float, redis_s: float, after_s: float) -> Finding:
    """Compare Redis's clock with this machine's, read at `before_s` and at `after_s`."""
    ahead_s = redis_s - (before_s + after_s) / 2
    uncertain_s = abs(after_s - before_s) / 2
    if abs(ahead_s) - uncertain_s <= CLOCK_S:
        text = f"the clocks of Redis and this machine agree within {CLOCK_S:g} s"
        return ok("redis", "clock", text, within_s=CLOCK_S)
    apart_s, direction = abs(ahead_s), "ahead of" if ahead_s > 0 else "behind"
    text = (
        f"Redis's clock is {apart_s:.1f} s {direction} this machine's; deadlines follow Redis's "
        "clock, the `expires` of a Celery client follows the client's clock"
    )
    facts = {"apart_s": apart_s, "direction": direction}
    return remark("redis", "clock_differs", text, "set both by NTP", **facts)


def check_rights(store: BatchStore, queue: str, *, worker: bool) -> Finding:
    """Check the rights of Redis's user: those of a producer and, with `worker`, of a worker."""
    needed_by = ["a producer"] + ["a worker"] * worker
    if missing := missing_permissions(store, queue, worker=worker):
        return rights_missing(missing, needed_by)
    text = f"this user has all rights of {' and '.join(needed_by)}"
    return ok("redis", "rights", text, needed_by=needed_by)


def rights_missing(missing: list[str], needed_by: list[str]) -> Finding:
    """Return the finding for missing rights."""
    text = f"this user lacks rights of {' and '.join(needed_by)} ({listed(missing)})"
    facts = {"missing": missing, "needed_by": needed_by}
    return problem("redis", "rights_missing", text, _RIGHTS_REMEDY, **facts)


def check_tenant_records(usage: TenantUsage, most: int) -> Finding:
    """Check the memory of a tenant's records; gateways refuse more than `most` bytes."""
    kinds = [f"{count} {kind}" for kind, count in usage.kinds.items()]
    facts = {
        "tenant": usage.tenant, "held_bytes": usage.bytes, "most_bytes": most, "kinds": kinds,
        "sampled": usage.sampled,
    }  # fmt: skip
    listing = listed([counted(count, kind) for kind, count in usage.kinds.items()])
    listing += " among its first records" if usage.sampled else ""
    text = f"tenant {usage.tenant} has {size_text(usage.bytes)} of records"
    if usage.bytes < most * RECORDS_HIGH:
        return ok("redis", "records", f"{text}: {listing}", **facts)
    return remark(
        "redis", "records_high", f"{text}, of at most {size_text(most)}: {listing}",
        f"`producer records -t {usage.tenant}` lists them, `producer delete ID` removes one",
        **facts,
    )  # fmt: skip
