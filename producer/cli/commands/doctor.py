"""`producer doctor`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from producer.cli import options, show
from producer.cli.context import Exit
from producer.cli.doctor.examine import examine
from producer.cli.doctor.judge import Code, Finding, Level
from producer.cli.progress import counted, tell
from producer.cli.show import size_text
from producer.queue_workers import clock_text

MARKS: dict[Level, str] = {"ok": "ok", "remark": "--", "problem": "!!"}
#: So many of a list are shown.
_SHOWN = 8
_WORKER = "{id}: {state}{why}{runs}, queue {queue}{model}{version}"
#: Each code's text and remedy, with the facts of its finding; '' where nothing is to be done.
WORDS: dict[Code, tuple[str, str]] = {
    # -- Redis
    "server": ("{name} {version} at {url}", ""),
    "server_too_old": (
        "{name} {version} at {url} is too old",
        "warmq needs Redis 6.2 or newer, or Valkey",
    ),
    "redis_unusable": (
        "cannot be used: {error}",
        "start Redis, or correct WARMQ_REDIS_URL",
    ),
    "forbidden": (
        "not allowed to look at {what}; {error}",
        "give this user the rights that docs/how-to/security.md lists",
    ),
    "not_looked": (
        "not looked for: {what}, for which all keys are read, and user {user} is one of its own",
        "run it once as Redis' default user",
    ),
    "cluster": (
        "this Redis runs in cluster mode",
        "use one without `cluster-enabled yes`: warmq's scripts touch keys of several slots",
    ),
    "sentinel": (
        "{url} is a Sentinel, which holds no data",
        "write WARMQ_REDIS_URL=sentinel://user:password@host:26379/0?master=NAME",
    ),
    "replica": (
        "this Redis is a replica and takes no writes",
        "point WARMQ_REDIS_URL at its primary, {primary}, or use sentinel://",
    ),
    "aof_on": (
        "the append-only file is on, so what a crash of Redis costs is in docs/how-to/redis.md",
        "",
    ),
    "aof_off": (
        "the append-only file is off, so a crash or restart of Redis costs everything since its "
        "last snapshot, queue and results",
        "set `appendonly yes` in redis.conf for more than a trial",
    ),
    "evicts_nothing": ("maxmemory-policy is noeviction, so nothing is dropped", ""),
    "evicts": (
        "maxmemory-policy is {policy}, so a full Redis drops results and whole batches in silence",
        "set `maxmemory-policy noeviction` in redis.conf, or by CONFIG SET",
    ),
    "other_policy": (
        "maxmemory-policy is {policy}, which has no effect while maxmemory is 0",
        "set `maxmemory-policy noeviction` before you set maxmemory",
    ),
    "memory": ("{used_bytes} of maxmemory {limit_bytes} used ({percent} %)", ""),
    "memory_unlimited": (
        "{used_bytes} used; maxmemory is not set, so nothing stops Redis from filling the machine",
        "set maxmemory (docs/how-to/redis.md)",
    ),
    "memory_high": (
        "{used_bytes} of maxmemory {limit_bytes} used ({percent} %), which is above "
        "WARMQ_HIGH_WATER, so submit waits",
        "collect and `producer delete` finished batches, or raise maxmemory",
    ),
    "memory_full": (
        "Redis is full ({used_bytes} of maxmemory {limit_bytes}) and refuses new requests",
        "collect and `producer delete` finished batches, or raise maxmemory",
    ),
    "records": ("tenant {tenant} keeps {held_bytes} of records of {kinds}{sampled}", ""),
    "records_high": (
        "tenant {tenant} keeps {held_bytes} of {most_bytes} that a tenant's records may take: "
        "{kinds}{sampled}",
        "`producer records -t {tenant}` lists them, `producer delete ID` removes one",
    ),
    "clock": ("the clocks of Redis and this machine agree within {within_s:g} s", ""),
    "clock_differs": (
        "Redis' clock is {apart_s:.1f} s {direction} this machine's; deadlines count by Redis' "
        "clock, the `expires` of Celery clients by theirs",
        "set both by NTP",
    ),
    "rights": ("this user has all rights of {needed_by}", ""),
    "rights_missing": (
        "this user lacks rights of {needed_by} ({missing})",
        "give it those that docs/how-to/security.md lists (ACL SETUSER)",
    ),
    # -- workers
    "worker": (_WORKER, ""),
    "worker_starting": (_WORKER, "it takes requests when it is ready; its log says how far it is"),
    "worker_degraded": (_WORKER, "its engine died and is being rebuilt; its log says why"),
    "worker_waits": (_WORKER, "its requests wait meanwhile, and none is lost"),
    "worker_draining": (_WORKER, "it was told to stop and takes no more requests"),
    "worker_stopped": (
        "{id} has failed and stopped{why}, queue {queue}",
        "correct what it says, and start it again; its log says more",
    ),
    "worker_silent": (
        "{id} was last heard {silent_s} ago ({state}, queue {queue})",
        "if it was not stopped on purpose, its log says why it ended",
    ),
    "worker_other_version": (
        "{id} runs warmq {other_version}, this producer {own}",
        "install the same version everywhere",
    ),
    "worker_older": (
        "{id} speaks protocol {theirs}, this producer {own}: it does not take what this one queues",
        "upgrade the worker",
    ),
    "worker_newer": (
        "{id} speaks protocol {theirs}, this producer {own}: it may not be read right from here",
        "upgrade the producer",
    ),
    "no_worker": (
        "no worker runs on this Redis",
        "start one with the same WARMQ_REDIS_URL; `python -m worker.check` says whether it can run",
    ),
    # -- queue
    "queue": ("{queue}: {waiting} waiting, {in_flight} in flight, workers: {workers}", ""),
    "queue_unserved": (
        "queue {queue} has {requests} waiting, and no worker serves it{others}",
        "start a worker for it (WARMQ_SERVED_MODEL_NAME), or cancel its batches and submit them "
        "with another --model",
    ),
    "queue_unused": (
        "no worker serves queue {queue}{others}",
        "submit with --model, or start a worker for it",
    ),
    "suspects": (
        "queue {queue} has {requests} suspected of killing an engine",
        "a worker runs each apart from the others; what does it again becomes a dead letter",
    ),
    "wrong_type": (
        "the key {key!r} is a {kind} of another program, and warmq has its own under this name",
        "remove or rename it, or choose another database (WARMQ_REDIS_URL) or WARMQ_QUEUE",
    ),
    "unread_list": (
        "{requests} for queue {queue} in the list {key!r}, which no worker reads: a Celery client "
        "sets {option}",
        "remove {option} from its broker_transport_options and send again (docs/how-to/python.md)",
    ),
    "no_dead_letters": ("no dead letters", ""),
    "dead_letters": (
        "{letters}{more}",
        "`producer dead list` says why; retry or delete them",
    ),
    "no_open_batch": ("no unfinished batch ({batches} in all)", ""),
    "open_batch": (
        "unfinished batches: {unfinished}; the oldest is {id}: {status}, {done}/{total} done, "
        "submitted {age_s} ago",
        "",
    ),
    # -- disk
    "disk": ("{free_bytes} free in {folder}", ""),
    "disk_low": ("only {free_bytes} free in {folder}", "make room before you collect results here"),
    "disk_full": ("only {free_bytes} free in {folder}", "make room, or write results elsewhere"),
    "folder_unwritable": (
        "no file can be written in {folder}",
        "change to another folder, or name one with -o",
    ),
    "redis_writes_fail": (
        "Redis could not write its {what} the last time it tried",
        "look at its log and at the free space of its disk; it may refuse all writes",
    ),
    # -- settings
    "version": ("warmq {version}, Python {python}", ""),
    "settings": ("{given}", ""),
    "settings_wrong": ("{error}", "correct it in the environment, .env or warmq.toml"),
}


@click.command("doctor")
@click.option(
    "--worker", is_flag=True, help="Redis' user must have the rights of a worker too: try them."
)
@options.as_json
def command(*, worker: bool, as_json: bool) -> Exit:
    """Look for what is in the way: Redis, workers, queues, disk, settings.

    Nothing is changed. Each line begins with `ok`, with `--` for what you may want
    to change, or with `!!` for what stops the work; behind the colon is the remedy.
    Ends with 0 without a `!!`, with 1 with one, with 3 if Redis cannot be used.
    """
    found = []
    for finding in examine(_current_folder(), worker=worker):
        found.append(finding)
        if not as_json:
            text, remedy = text_and_remedy(finding)
            line = f"{MARKS[finding.level]}  {finding.area:<8}  {text}"
            click.echo(show.harmless(f"{line}: {remedy}" if remedy else line))
    problems = sum(finding.level == "problem" for finding in found)
    if as_json:
        show.put_json(_document(found))
    else:
        tell(counted(problems, "problem"))
    if any(finding.code == "redis_unusable" for finding in found):
        return Exit.UNREACHABLE
    return Exit.SOME_FAILED if problems else Exit.ALL_WELL


def _current_folder() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # somebody has deleted it
        return None


def _document(found: Sequence[Finding]) -> dict[str, object]:
    return {
        "object": "warmq.doctor",
        "healthy": all(finding.level != "problem" for finding in found),
        "findings": [_finding_json(finding) for finding in found],
    }


def _finding_json(finding: Finding) -> dict[str, object]:
    text, remedy = text_and_remedy(finding)
    return {
        "area": finding.area,
        "code": finding.code,
        "level": finding.level,
        "text": text,
        "remedy": remedy or None,
        "facts": finding.facts,
    }


def text_and_remedy(finding: Finding) -> tuple[str, str]:
    """Return what a finding says and what to do about it, '' for nothing."""
    text, remedy = WORDS[finding.code]
    shown = {name: _shown(name, value) for name, value in finding.facts.items()}
    shown |= _phrases(finding.facts)
    return text.format_map(shown), remedy.format_map(shown)


def _shown(name: str, value: Any) -> Any:
    if name.endswith("_bytes"):
        return size_text(value)
    if name in ("silent_s", "age_s"):
        return clock_text(value)
    return _listed(value) if isinstance(value, list) else value


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _phrases(facts: dict[str, Any]) -> dict[str, str]:
    """Return the parts of sentences that are left out where there is nothing to say."""
    phrases = {
        "why": f" ({facts['why']})" if facts.get("why") else "",
        "model": f", model {facts['model']}" if facts.get("model") else "",
        "others": f"; served are: {_listed(facts['others'])}" if facts.get("others") else "",
        "more": " or more" if facts.get("more") else "",
        "sampled": " among its first" if facts.get("sampled") else "",
    }
    if "in_flight" in facts and "limit" in facts:
        limit = f" of {facts['limit']}" if facts["limit"] is not None else ""
        phrases["runs"] = f", {facts['in_flight']}{limit} in flight"
        phrases["version"] = f", warmq {facts['version']}" if facts.get("version") else ""
        phrases["other_version"] = str(facts.get("version"))
    for name in {"waiting", "count"} & facts.keys():
        phrases["requests"] = counted(facts[name], "request")
        phrases["letters"] = counted(facts[name], "dead letter")
    if "needed_by" in facts:
        phrases["needed_by"] = " and ".join(facts["needed_by"])
    if "given" in facts:
        phrases["given"] = ", ".join(facts["given"]) or "all settings have their defaults"
    return phrases
