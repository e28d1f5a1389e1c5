"""Batches in a real drain: what can be met is met, what cannot is named at its submit."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from kit.commands.support import as_json, batch_file, run_producer
from kit.drain.draining import draining, soon
from kit.protocol.lessee import QUEUE, submit_batch

from contract.redis.batches import BatchStore
from contract.redis.history import HistoryReads
from worker.drain import deadlines, progress

#: 100 requests a second.
SLOTS, LATENCY_S = 4, 0.04


@pytest.mark.timeout(240)
async def test_the_deadlines_that_can_be_met_are_met_and_the_hopeless_one_is_named(
    redis_url: str, store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "WRITE_S", 1.0)
    monkeypatch.setattr(deadlines, "EVERY_S", 1.0)
    file, ring = batch_file(tmp_path / "in", 5000), HistoryReads.using(store)
    settings = {"simulated_slots": SLOTS, "simulated_latency_s": LATENCY_S}
    async with draining(redis_url, **settings) as running:
        began = time.monotonic()
        submit_batch(store, 200, batch_id="warm")
        await soon(lambda: sum(m.completed for m in ring.day([QUEUE], 5)) == 200, 60)
        # 600 requests need this time, if all slots are theirs; a busy machine may be twice as slow.
        needed_s = 600 * (time.monotonic() - began) / 200
        left_s = max(20.0, 2.2 * needed_s)
        # By turns alone the batch with a deadline would get a quarter.
        for name in ("any", "more"):
            submit_batch(store, 3000, batch_id=name)
        began = time.monotonic()
        done = await asyncio.to_thread(
            run_producer, "submit", file, "--batch-id", "hopeless", "--deadline", "20s",
            redis_url=redis_url,
        )  # fmt: skip
        assert time.monotonic() - began < 10
        assert done.returncode == 0, done.stderr
        assert "batch hopeless will miss its deadline by about" in done.stderr
        due = submit_batch(store, 600, batch_id="due", deadline=f"+{round(left_s * 1000)}").batch
        shown = as_json(await asyncio.to_thread(
            run_producer, "status", "hopeless", "--json", redis_url=redis_url
        ))  # fmt: skip
        assert "deadline_late" in [one["code"] for one in shown["stalls"]]

        def ended() -> bool:
            batch = store.batch("due")
            return batch is not None and batch.finished

        await soon(lambda: running.drain.urgent, left_s, "it must begin")
        await soon(ended, left_s)
    batch, rest = store.batch("due"), store.batch("any")
    assert batch is not None and rest is not None
    assert (batch.status, batch.number("completed")) == ("completed", 600)
    assert batch.number("finished_at") <= due.number("deadline")
    assert rest.number("completed") > 0
