"""The verdict on gateways that were killed: nothing lost, nothing doubled, nothing half."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import openai
import orjson
from kit.campaigns.gateway_campaign import HANG_S, GatewayCampaign
from kit.campaigns.gateway_clients import Asked
from kit.campaigns.gateway_history import History, read_history
from kit.campaigns.gateway_report import TAKEOVER_S
from kit.gateways.http_batches import lines_of
from kit.protocol.lessee import client_of
from kit.verdicts.observer import read_writes
from kit.verdicts.owners import ownerless

from demo.stack import eventually
from gateway.files.files import MARK
from gateway.redis.webhooks import EVENTS
from worker.engine.simulated.engine import digest

#: How a batch of each kind may end.
ENDS = {
    "whole": ("completed",), "cancelled": ("cancelled", "completed"),
    "late": ("expired", "completed"), "refused": ("failed",),
}  # fmt: skip
#: LEASE_S of gateway/settings.py.
LEASE_S = 6.0


def judge(c: GatewayCampaign) -> None:
    """Write into the campaign's report what it is to be blamed for."""
    history = read_history(c.redis.folder, LEASE_S)
    ended = {asked.id: _batch(c, asked, history) for asked in c.asked}
    c.report.batches = Counter(batch.status for batch in ended.values())
    _judge_history(c, history)
    _judge_webhooks(c, ended)
    _judge_store(c)
    logs = [gateway.log_path.read_text(errors="replace") for gateway in c.gateways]
    c.report.tracebacks = sum(log.count("Traceback") for log in logs)
    client = client_of(c.store)
    made = set(_ids(c, "batch")) - set(ended)
    c.report.made_twice = len(made)
    try:
        eventually(lambda: not ownerless(client), 30, every_s=0.5)
    except TimeoutError:
        left = ownerless(client)
        c.report.orphan_keys = len(left)
        c.blame("orphans", left)


def _ids(c: GatewayCampaign, kind: str) -> list[str]:
    begin = f"warmq:gateway:{kind}:"
    found = client_of(c.store).scan_iter(f"{begin}*", count=1000)
    return [key.decode().removeprefix(begin) for key in found]


# -- batches ----------------------------------------------------------------------------------


def _batch(c: GatewayCampaign, asked: Asked, history: History) -> Any:
    """Judge one batch by what clients read of it; return it."""
    batch = c.ask(lambda client: client.batches.retrieve(asked.id))
    if batch.status not in ENDS[asked.kind]:
        c.report.lost += 1
        c.blame(f"{asked.id} ({asked.kind})", batch)
    wanted = Counter(asked.custom_ids)
    if asked.kind == "refused" or "in_progress" not in history.states[asked.id]:
        wanted = Counter()  # then it has no files
    good = c.ask(lambda client: lines_of(client, batch.output_file_id))
    bad = c.ask(lambda client: lines_of(client, batch.error_file_id))
    found = Counter(line["custom_id"] for line in (*good, *bad))
    c.report.requests += wanted.total()
    _count(c, "lost", asked.id, wanted - found)
    _count(c, "doubled", asked.id, found - wanted)
    _count(c, "wrong", asked.id, Counter(line["custom_id"] for line in good if not _true(line)))
    if wanted:
        counts = batch.request_counts
        if (counts.completed, counts.failed) != (len(good), len(bad)):
            c.report.wrong += 1
            c.blame(asked.id, counts)
    content = c.ask(lambda client: client.files.content(asked.file_id).content)
    if content != asked.content:
        c.report.half_files += 1
        c.blame(asked.file_id, f"{len(content)} bytes of {len(asked.content)}")
    return batch


def _count(c: GatewayCampaign, what: str, batch_id: str, found: Counter[str]) -> None:
    if found:
        setattr(c.report, what, getattr(c.report, what) + found.total())
        c.blame(f"{batch_id}: {what}", found.most_common(5))


def _true(line: dict[str, Any]) -> bool:
    """Whether an answer belongs to its question, which was the line's custom_id."""
    asked = {"messages": [{"role": "user", "content": line["custom_id"]}]}
    body = line["response"]["body"]
    return bool(body["choices"][0]["message"]["content"] == f"simulated {digest(asked)}")


# -- Redis' and the engines' own records -------------------------------------------------------


def _judge_history(c: GatewayCampaign, history: History) -> None:
    report = c.report
    if twice := history.ended_twice():
        report.ended_twice = len(twice)
        c.blame("states", twice)
    for takeover in history.takeovers:
        seconds = takeover.seconds_after(c.killed_at, c.outages, c.resets.at)
        if seconds is None:
            report.robbed += 1
            resets = [round(at - takeover.last_sign) for at in c.resets.at]
            c.blame("robbed", (takeover, [after for after in resets if abs(after) < 10_000]))
            continue
        report.takeovers[takeover.kind] += 1
        longest = max(report.takeover_s.get(takeover.kind, 0), round(seconds, 2))
        report.takeover_s[takeover.kind] = longest
        if seconds > TAKEOVER_S and takeover.kind in ("batch", "webhook"):
            report.slow_takeovers += 1
            c.blame("slow", takeover)
    twice_computed = {r: n for r, n in c.engine_log.look().ends.items() if n > 1}
    report.computed_twice = len(twice_computed)
    report.committed_twice = len(read_writes(c.redis.folder).changed)


def _judge_webhooks(c: GatewayCampaign, ended: dict[str, Any]) -> None:
    """Each end was told, under one id, in words that the SDK verifies."""
    sdk, told, ids = openai.OpenAI(api_key="none"), defaultdict[str, set[str]](set), Counter[str]()
    wanted = {f"{b.id} batch.{b.status}" for b in ended.values() if f"batch.{b.status}" in EVENTS}
    heard = lambda: {f"{e['data']['id']} {e['type']}" for e in map(_event, c.receiver.got)}  # noqa: E731
    try:
        eventually(lambda: heard() >= wanted, HANG_S, every_s=0.5)
    except TimeoutError:
        c.report.undelivered = len(wanted - heard())
        c.blame("undelivered", wanted - heard())
    for headers, body in c.receiver.got:
        # Tests take longer than the five minutes that a signature counts for.
        event = orjson.loads(body)
        sdk.webhooks.verify_signature(body, headers, secret=c.secret, tolerance=86_400)
        told[f"{event['data']['id']} {event['type']}"].add(headers["webhook-id"])
        ids[headers["webhook-id"]] += 1
    c.report.deliveries = ids.total()
    c.report.delivered_again = ids.total() - len(ids)
    strange = {name: found for name, found in told.items() if name not in wanted or len(found) > 1}
    if strange:
        c.report.doubled += len(strange)
        c.blame("events", strange)


def _event(got: tuple[dict[str, str], bytes]) -> Any:
    return orjson.loads(got[1])


# -- files --------------------------------------------------------------------------------------


def _judge_store(c: GatewayCampaign) -> None:
    """What was left unfinished is swept once it is old; then each object is a whole file."""
    client = client_of(c.store)
    for kind in ("file", "upload"):  # what is removed in ten minutes, or an hour, is removed now
        if due := client.zrange(f"warmq:gateway:due:{kind}", 0, -1):
            client.zadd(f"warmq:gateway:due:{kind}", dict.fromkeys(due, 1), xx=True)
    long_ago = time.time() - 86_400
    for part in c.files.glob("*.part"):
        os.utime(part, (long_ago, long_ago))
    c.gateways[0].kill()
    c.gateways[0].start()  # gateways sweep their store when they begin, and every ten minutes
    try:
        eventually(lambda: not _not_whole(c), 40, every_s=0.5)
    except TimeoutError:
        found = _not_whole(c)
        c.report.half_files += len(found)
        c.blame("store", found)


def _not_whole(c: GatewayCampaign) -> dict[str, str]:
    """Return objects that nobody owns, files without or with another content."""
    client, sizes = client_of(c.store), _sizes(c.files)
    found: dict[str, str] = {}
    files = set(_ids(c, "file"))
    for name in files:
        document = client.hget(f"warmq:gateway:file:{name}", "document")
        recorded = orjson.loads(document)["bytes"] if document else None
        if sizes.get(name) != recorded:
            found[name] = f"{sizes.get(name)} bytes, {recorded} recorded"
    for name in sizes.keys() - files:
        found[name] = "belongs to no file"
    return found


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.iterdir() if not path.name.startswith(MARK))
    return {path.name: path.stat().st_size for path in files}
