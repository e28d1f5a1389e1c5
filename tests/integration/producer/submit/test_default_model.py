"""`--model` with the name of the model that the default queue's workers serve."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from kit.commands.doctor_findings import announce
from kit.commands.support import batch_file, run_all, run_producer
from kit.protocol.lessee import QUEUE

from contract.redis.batches import BatchStore
from producer import Client

WORKER = "celery@a.12.0a1b2c3d"


def queue_of(store: BatchStore, batch_id: str) -> str:
    batch = store.batch(batch_id)
    assert batch is not None
    return batch.fields["queue"]


@pytest.mark.parametrize("name", ["tiny", "/models/tiny"])
def test_the_default_queues_model_is_served_by_the_default_queue(
    redis_url: str, store: BatchStore, tmp_path: Path, name: str
) -> None:
    announce(store, WORKER, model="/models/tiny")
    path = batch_file(tmp_path / "in.jsonl", 3)
    args = ("submit", path, "--batch-id", "b1", "--model", name)
    done = run_producer(*args, redis_url=redis_url)
    assert "no worker serves" not in done.stderr
    assert (queue_of(store, "b1"), run_all(store)) == (QUEUE, 3)
    plan = run_producer("plan", path, "--model", name, "--json", redis_url=redis_url).stdout
    assert orjson.loads(plan)["queue"] == QUEUE
    assert queue_of(store, Client(redis_url).submit([{"prompt": "x"}], model=name).id) == QUEUE


def test_the_same_command_goes_on_when_the_worker_is_gone(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    announce(store, WORKER, model="/models/tiny")
    args = ("submit", batch_file(tmp_path / "in.jsonl", 3), "--batch-id", "b1", "--model", "tiny")
    run_producer(*args, redis_url=redis_url)
    announce(store, WORKER, model="/models/other")
    again = run_producer(*args, redis_url=redis_url)
    assert (again.returncode, queue_of(store, "b1")) == (0, QUEUE)


def test_a_model_with_a_queue_of_its_own_keeps_it(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    own = f"{QUEUE}.tiny"
    announce(store, WORKER, model="/models/tiny")
    announce(store, "celery@b.12.0a1b2c3d", model="tiny", queue=own)
    path = batch_file(tmp_path / "in.jsonl", 3)
    run_producer("submit", path, "--batch-id", "b1", "--model", "tiny", redis_url=redis_url)
    assert queue_of(store, "b1") == own
