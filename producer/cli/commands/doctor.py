"""`producer doctor`."""

from pathlib import Path
from typing import Any

import click

from producer.cli import options, show
from producer.cli.context import Exit
from producer.cli.doctor.checks import examine
from producer.cli.doctor.findings import Code, Finding, Level
from producer.cli.progress import counted, tell
from producer.cli.show import size_text
from producer.queue_workers import clock_text

MARKS: dict[Level, str] = {"ok": "ok", "remark": "--", "problem": "!!"}
#: Names of a list that are printed.
_MOST_NAMES = 8
_WORKER = "{id}: {state}{why}{runs}, queue {queue}{model}{version}"
#: Text and remedy of each code, filled with the facts of its finding; '' for no remedy.
TEXTS: dict[Code, tuple[str, str]] = {
    # -- Redis
    "server": ("{name} {version} at {url}", ""),
    "server_too_old": (
        "{name} {version} at {url} is too old",
        "warmq needs Redis 6.2 or newer, or Valkey",
    ),
    "redis_unusable": ("cannot be used: {error}", "start Redis, or correct WARMQ_REDIS_URL"),
    "forbidden": (
        "this user may not read {what}; {error}",
        "give this user the rights that docs/security.md lists",
    ),
    "not_looked": (
        "not checked: {what}; that reads all keys, and {user} is a restricted user",
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
        "the append-only file is on; docs/redis.md states what a crash of Redis can lose",
        "",
    ),
    "aof_off": (
        "the append-only file is off, so a crash or restart of Redis loses everything since its "
        "last snapshot, queue and results",
        "set `appendonly yes` in redis.conf for more than a trial",
    ),
    "evicts_nothing": ("maxmemory-policy is noeviction, so nothing is dropped", ""),
    "evicts": (
        "maxmemory-policy is {policy}, so a full Redis silently drops results and whole batches",
        "set `maxmemory-policy noeviction` in redis.conf, or by CONFIG SET",
    ),
    "other_policy": (
        "maxmemory-policy is {policy}, which has no effect while maxmemory is 0",
        "set `maxmemory-policy noeviction` before you set maxmemory",
    ),
    "memory": ("{used_bytes} of maxmemory {limit_bytes} used ({percent} %)", ""),
    "memory_unlimited": (
        "{used_bytes} used; maxmemory is not set, so Redis can fill the machine's memory",
        "set maxmemory (docs/redis.md)",
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
    "records": ("tenant {tenant} has {held_bytes} of records: {kinds}{sampled}", ""),
    "records_high": (
        "tenant {tenant} has {held_bytes} of records, of at most {most_bytes}: {kinds}{sampled}",
        "`producer records -t {tenant}` lists them, `producer delete ID` removes one",
    ),
    "clock": ("the clocks of Redis and this machine agree within {within_s:g} s", ""),
    "clock_differs": (
        "Redis' clock is {apart_s:.1f} s {direction} this machine's; deadlines follow Redis' "
        "clock, the `expires` of Celery clients their own",
        "set both by NTP",
    ),
    "rights": ("this user has all rights of {needed_by}", ""),
    "rights_missing": (
        "this user lacks rights of {needed_by} ({missing})",
        "give it those that docs/security.md lists (ACL SETUSER)",
    ),
    # -- workers
    "worker": (_WORKER, ""),
    "worker_starting": (_WORKER, "it takes requests when it is ready; its log shows its progress"),
    "worker_degraded": (_WORKER, "its engine died and is being rebuilt; its log has the reason"),
    "worker_waits": (_WORKER, "its requests wait meanwhile, and none is lost"),
    "worker_draining": (_WORKER, "it is stopping and takes no more requests"),
    "worker_stopped": (
        "{id} has failed and stopped{why}, queue {queue}",
        "correct the cause and start it again; its log has the details",
    ),
    "worker_silent": (
        "{id} last announced itself {silent_s} ago ({state}, queue {queue})",
        "unless it was stopped on purpose, read the end of its log",
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
        "{id} speaks protocol {theirs}, this producer {own}: this producer may misread it",
        "upgrade the producer",
    ),
    "no_worker": (
        "no worker runs on this Redis",
        "start one with the same WARMQ_REDIS_URL; `python -m worker.check` checks its machine",
    ),
    # -- queue
    "queue": ("{queue}: {waiting} waiting, {in_flight} in flight, workers: {workers}", ""),
    "queue_unserved": (
        "queue {queue} has {requests} waiting, and no worker serves it{served}",
        "start a worker for it (WARMQ_SERVED_MODEL_NAME), or cancel its batches and submit them "
        "with another --model",
    ),
    "queue_unused": (
        "no worker serves queue {queue}{served}",
        "submit with --model, or start a worker for it",
    ),
    "suspects": (
        "queue {queue} has {requests} suspected of killing an engine",
        "a worker runs each of them alone; one that kills it again becomes a dead letter",
    ),
    "wrong_type": (
        "the key {key!r} is a {kind} of another program, but warmq uses this name",
        "remove or rename it, or choose another database (WARMQ_REDIS_URL) or WARMQ_QUEUE",
    ),
    "unread_list": (
        "{requests} for queue {queue} in the list {key!r}, which no worker reads: a Celery client "
        "sets {option}",
        "remove {option} from its broker_transport_options, and send them again (docs/python.md)",
    ),
    "no_dead_letters": ("no dead letters", ""),
    "dead_letters": (
        "{letters}{more}",
        "`producer dead list` has their reasons; retry or delete them",
    ),
    "no_open_batch": ("no unfinished batch ({batches} in all)", ""),
    "open_batch": (
        "unfinished batches: {unfinished}; the oldest is {id}: {status}, {done}/{total} done, "
        "submitted {age_s} ago",
        "",
    ),
    # -- disk
    "disk": ("{free_bytes} free in {folder}", ""),
    "disk_low": ("only {free_bytes} free in {folder}", "free some before you collect results here"),
    "disk_full": ("only {free_bytes} free in {folder}", "free some, or write results elsewhere"),
    "folder_unwritable": (
        "no file can be written in {folder}",
        "change to another folder, or name one with -o",
    ),
    "redis_writes_fail": (
        "Redis could not write its {what} the last time it tried",
        "check its log and the free space of its disk; it may refuse all writes",
    ),
    # -- settings
    "version": ("warmq {version}, Python {python}", ""),
    "settings": ("{given}", ""),
    "settings_wrong": ("{error}", "correct it in the environment, .env or warmq.toml"),
}


@click.command("doctor")
@click.option("--worker", is_flag=True, help="Check the rights that a worker needs in Redis too.")
@options.as_json
def command(*, worker: bool, as_json: bool) -> Exit:
    """Check Redis, workers, queues, disk and settings, and name what stops the work.

    Nothing is changed. Each line begins with `ok`, with `--` for what you may want
    to change, or with `!!` for what stops the work; the remedy follows the colon.
    Exit status: 0; 1 if there is a `!!`; 3 if Redis cannot be used.
    """
    found = []
    for finding in examine(_current_folder(), worker=worker):
        found.append(finding)
        if not as_json:
            text, remedy = text_and_remedy(finding)
            line = f"{MARKS[finding.level]}  {finding.area:<8}  {text}"
            click.echo(show.printable(f"{line}: {remedy}" if remedy else line))
    problems = sum(finding.level == "problem" for finding in found)
    if as_json:
        documents = [_finding_json(finding) for finding in found]
        show.put_json({"object": "warmq.doctor", "healthy": not problems, "findings": documents})
    else:
        tell(counted(problems, "problem"))
    if any(finding.code == "redis_unusable" for finding in found):
        return Exit.UNREACHABLE
    return Exit.SOME_FAILED if problems else Exit.ALL_WELL


def _current_folder() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was deleted
        return None


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
    """Return a finding's text and its remedy, '' for none."""
    text, remedy = TEXTS[finding.code]
    values = {name: _shown(name, value) for name, value in finding.facts.items()}
    values |= _phrases(finding.facts)
    return text.format_map(values), remedy.format_map(values)


def _shown(name: str, value: Any) -> Any:
    if name.endswith("_bytes"):
        return size_text(value)
    if name in ("silent_s", "age_s"):
        return clock_text(value)
    return _listed(value) if isinstance(value, list) else value


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _phrases(facts: dict[str, Any]) -> dict[str, str]:
    """Return the optional parts of sentences, '' where their facts are missing."""
    served = facts.get("others")
    phrases = {
        "why": f" ({facts['why']})" if facts.get("why") else "",
        "model": f", model {facts['model']}" if facts.get("model") else "",
        "served": f"; served are: {_listed(served)}" if served else "",
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
