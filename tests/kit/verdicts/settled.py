"""The one verdict on a batch that ran under faults: nothing lost, nothing doubled, nothing left."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
from kit.commands.support import producer_command, producer_env
from kit.protocol.lessee import client_of
from kit.verdicts.observer import Writes, read_writes
from kit.verdicts.owners import ownerless

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.results import OUTCOMES, outcome_of
from demo.stack import eventually
from worker.engine.simulated.engine import digest


def assert_batch_settled(
    store: BatchStore,
    batch_id: str,
    bodies: Mapping[str, Mapping[str, Any]],
    *,
    failed: Mapping[str, str] | None = None,
    simulated: bool = True,
    model: str = "",
    cancelled: bool = False,
    lines_in: Path | None = None,
) -> None:
    """Assert that a batch ended as it must.

    Args:
        store: where it is.
        batch_id: the batch.
        bodies: what was asked, by custom_id; nothing else may be answered.
        failed: the error code of each custom_id that must have failed; all others completed.
        simulated: whether the simulated engine answered: then each answer carries the
            digest of its own prompt.
        model: the model that each answer names as the one that was loaded (`names_model`).
        cancelled: whether it was cancelled under way: then any request may have ended so.
        lines_in: a folder to collect the output lines into, with the real command.
    """
    failed = failed or {}
    batch = store.batch(batch_id)
    assert batch is not None and batch.finished, batch
    ids = {
        entry[1]: rid
        for chunk in store.index(batch_id)
        for entry, rid in zip(chunk.entries, chunk.request_ids(batch_id), strict=True)
    }
    assert set(ids) == set(bodies)
    outcomes: Counter[str] = Counter()
    for (custom_id, rid), raw in zip(ids.items(), store.results(list(ids.values())), strict=True):
        assert raw is not None, f"{custom_id} ({rid}) is lost"
        meta = orjson.loads(raw)
        outcomes[outcome_of(meta)] += 1
        cut = cancelled and outcome_of(meta) == "cancelled"
        if custom_id in failed and not cut:
            assert meta["warmq"]["error"]["code"] == failed[custom_id], (custom_id, meta)
        elif not cut:
            assert meta["status"] == "SUCCESS", (custom_id, meta)
            if simulated:
                words = ["simulated", *([model] if model else []), digest(dict(bodies[custom_id]))]
                assert _text(meta["result"]).split() == words
        assert meta["warmq"]["custom_id"] == custom_id
    assert {name: batch.number(name) for name in OUTCOMES} == {n: outcomes[n] for n in OUTCOMES}
    assert batch.number("total") == len(bodies)
    finished = Counter(store.finished_ids(batch_id, 0, 2 * len(bodies) + 10))
    assert set(finished) == set(ids.values())
    if not batch.number("retried"):
        assert set(finished.values()) == {1}
    if lines_in is not None:
        _assert_lines(store, batch_id, bodies, failed, lines_in)


def _text(response: dict[str, Any]) -> str:
    choice = response["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _assert_lines(
    store: BatchStore, batch_id: str, bodies: Mapping[str, Any], failed: Mapping[str, str],
    folder: Path,
) -> None:  # fmt: skip
    """The command's output has one line for each request, in the right file."""
    out, errors = folder / f"{batch_id}.out.jsonl", folder / f"{batch_id}.errors.jsonl"
    options = client_of(store).connection_pool.connection_kwargs
    ran = subprocess.run(
        producer_command("results", batch_id, "-o", out, "--errors", errors),
        env=producer_env(f"redis://127.0.0.1:{options['port']}/0"), capture_output=True, timeout=50,
        check=False,
    )  # fmt: skip
    assert ran.returncode == (1 if failed else 0), ran.stderr.decode()
    good = [orjson.loads(line)["custom_id"] for line in out.read_bytes().splitlines()]
    bad = [orjson.loads(line)["custom_id"] for line in errors.read_bytes().splitlines()]
    assert Counter(good + bad) == Counter(list(bodies))
    assert set(bad) == set(failed)


def leftovers(store: BatchStore, queues: Iterable[str] = (naming.DEFAULT_QUEUE,)) -> dict[str, Any]:
    """Return what must not be there when nothing is queued and nothing runs: orphans too."""
    redis, found = client_of(store), dict[str, Any]()
    for queue in queues:
        found |= {name: size for name, size in store.queue_lengths(queue).items() if size}
        # A list with turns has messages; one without them is left over, too.
        found |= {name: found.get(name, "has turns") for _, _, name in store.turns(queue)}
    found |= {key.decode(): redis.hlen(key) for key in redis.scan_iter("warmq:worker:*")}
    for name, size in (
        (keys.LEASES, redis.zcard(keys.LEASES)),
        (keys.DEATHS, redis.hlen(keys.DEATHS)),
        (keys.RETURNS, redis.hlen(keys.RETURNS)),
    ):
        if size:
            found[name] = size
    return found | ownerless(redis)


def assert_nothing_left(
    store: BatchStore, timeout_s: float = 10, queues: Iterable[str] = (naming.DEFAULT_QUEUE,)
) -> None:
    """Assert that nothing is left behind, soon: sweeps and retiring may still be under way."""
    try:
        eventually(lambda: not leftovers(store, queues), timeout_s)
    except TimeoutError:
        raise AssertionError(f"left in Redis: {leftovers(store, queues)}") from None


def assert_committed_once(redis_folder: Path, bodies: Mapping[str, Any], batch_id: str) -> Writes:
    """Assert that Redis's own record knows one commit for each request, and no later change."""
    writes = read_writes(redis_folder)
    assert writes.changed == []
    assert writes.usurped == []
    for custom_id in bodies:
        assert writes.commits[naming.request_id(batch_id, custom_id)] == 1, custom_id
    return writes
