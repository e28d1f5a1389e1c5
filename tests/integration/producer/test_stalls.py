"""Stalls in a real Redis: caps, memory, submits that have stopped."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kit.commands.doctor_findings import announce, up_for_long
from kit.commands.support import as_json, run_producer, state
from kit.protocol.lessee import QUEUE, Lessee, client_of, submit_batch
from redis import exceptions

from contract.batch import Batch
from contract.redis import keys
from contract.redis.announcements import WORKER_SILENT_S
from contract.redis.batches import BatchStore
from contract.redis.connect import connect
from contract.redis.reads import Reads
from contract.redis.tenants import Tenant, Tenants
from contract.settings import Settings
from demo.stack import RedisServer
from producer import outage
from producer.queue_workers import QueueWorkers
from producer.stalls import LeasesLost, Stall, StallReads
from producer.time_left import OutlookReads

SETTINGS = Settings()


def stalls(store: BatchStore, tenant: str | None = None, **changed: Any) -> dict[str, Stall]:
    settings = SETTINGS.model_copy(update=changed)
    found = StallReads.using(store).stalls(settings, [QUEUE], store.batches(), tenant)
    return {one.code: one for one in found}


def test_a_ready_worker_and_a_batch_that_is_submitted_are_no_stall(store: BatchStore) -> None:
    announce(store)
    submit_batch(store, 3)
    assert stalls(store) == {}


def test_suspects_wait_for_a_worker_too(store: BatchStore) -> None:
    client_of(store).lpush(keys.suspects_list(QUEUE), b"x")
    assert stalls(store)["queue_unserved"].facts["waiting"] == 1


def test_requests_of_a_cancelled_or_deleted_batch_do_not_wait(store: BatchStore) -> None:
    for name in ("b1", "b2", "b3"):
        submit_batch(store, 3, batch_id=name)
    cancelled, deleted = store.batch("b1"), store.batch("b2")
    assert cancelled is not None and deleted is not None
    store.cancel(cancelled)
    store.cancel(deleted)
    store.delete(deleted.id)
    assert stalls(store)["queue_unserved"].facts["waiting"] == 3
    last = store.batch("b3")
    assert last is not None
    store.cancel(last)
    assert "queue_unserved" not in stalls(store)


def test_the_windows_of_a_run_wait_although_no_batch_has_the_name_of_their_list(
    store: BatchStore,
) -> None:
    windows = [submit_batch(store, 3, batch_id=f"run_1.{n}", run="run_1").batch for n in range(2)]
    assert stalls(store)["queue_unserved"].facts["waiting"] == 6
    store.cancel(windows[0])
    assert "queue_unserved" in stalls(store)
    store.cancel(windows[1])
    assert "queue_unserved" not in stalls(store)
    for window in windows:
        store.delete(window.id)
    assert "queue_unserved" not in stalls(store)


def work(store: BatchStore) -> None:
    """Note that in this minute a slot had ten tokens a second, and a request ten tokens."""
    minute = store.now_ms() // 60_000
    ring = f"{minute} 60 0 600 0 0 60 240"
    client_of(store).hset(f"warmq:ring:{QUEUE}", str(minute % 1440), ring)


def test_a_batch_that_will_miss_its_deadline_is_named_as_its_user_knows_it(
    store: BatchStore,
) -> None:
    announce(store, slots=4)
    work(store)
    submit_batch(store, 2000, batch_id="due", deadline="+100000")
    facts = stalls(store)["deadline_late"].facts
    assert facts["batch"] == "due"
    assert 350 < facts["late_s"] < 450
    reads = StallReads.using(store)
    assert reads.late_batches([QUEUE], {}) == []
    (named,) = reads.stalls(SETTINGS, [QUEUE], [], None, {"due": "batch_1"})
    assert named.facts["batch"] == "batch_1"


def test_a_cap_stalls_requests_while_slots_are_free(store: BatchStore) -> None:
    announce(store, slots=4)
    Tenants.using(store).set_tenant(Tenant("alice", max_in_flight=2))
    submit_batch(store, 5, tenant="alice")
    Lessee(client_of(store), "celery@a.12.0a1b2c3d").pop(4)
    found = stalls(store)
    assert set(found) == {"tenant_capped"}
    facts = found["tenant_capped"].facts
    assert (facts["tenant"], facts["cap"], facts["waiting"]) == ("alice", 2, 3)
    assert "tenant set alice" in found["tenant_capped"].advice()
    assert stalls(store, "alice") == found
    assert stalls(store, "bob") == {}
    announce(store, slots=2)  # its cap is not what they wait for
    assert stalls(store) == {}


def test_requests_of_a_dead_worker_wait_until_its_lease_ends(
    redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, 5)
    Lessee(client_of(store), "celery@dead.7.1").pop(2)
    announce(store, "celery@dead.7.1", silent_s=-10)
    announce(store)
    Lessee(client_of(store), "celery@a.12.0a1b2c3d").pop(1)
    assert stalls(store) == {}
    up_for_long(store)
    announce(store)  # again: it is not to be silent meanwhile
    announce(store, "celery@dead.7.1", silent_s=20)
    stall = stalls(store)["lease_held"]
    assert (stall.facts["count"], stall.facts["queue"], stall.passing) == (2, QUEUE, True)
    assert 0 < stall.facts["left_s"] <= 60
    assert "celery@dead.7.1" in stall.sentence()
    client_of(store).hdel(keys.WORKERS, "celery@dead.7.1")  # others remove it after a minute
    assert stalls(store)["lease_held"].facts["count"] == 2
    shown = as_json(run_producer("status", "b1", "--json", redis_url=redis_url))
    assert [one["code"] for one in shown["stalls"]] == ["lease_held"]
    batch = store.batch("b1")
    assert batch is not None
    text = LeasesLost(store).text(batch)
    assert "its 2 requests of queue warmq wait for the end of their leases" in text


def test_a_run_waits_for_the_leases_of_its_windows(store: BatchStore) -> None:
    windows = [submit_batch(store, 3, batch_id=f"run_1.{n}", run="run_1").batch for n in range(2)]
    submit_batch(store, 1, batch_id="b1")
    Lessee(client_of(store), "celery@dead.7.1").pop(7)
    run = Batch("run_1", {"windows": "0"}, windows=tuple(windows))
    assert "its 6 requests of queue warmq wait" in LeasesLost(store).text(run)
    assert "its 3 requests of" in LeasesLost(store).text(windows[0])


def test_no_worker_counts_as_dead_while_redis_has_just_come_back(
    own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = BatchStore(own.client(), ttl_ms=60_000)
    submit_batch(before, 5)
    Lessee(client_of(before), "celery@a.12.0a1b2c3d").pop(2)
    announce(before, "celery@a.12.0a1b2c3d", silent_s=22)
    own.stop()
    own.start()
    store = BatchStore(own.client(), ttl_ms=60_000)
    assert stalls(store) == {}
    batch = store.batch("b1")
    assert batch is not None
    assert LeasesLost(store).text(batch) == ""
    assert QueueWorkers(store, QUEUE).text().startswith("workers: silent (celery@a (process 12)")
    assert "redis_up_s" not in store.workers(QUEUE)[0]
    monkeypatch.setattr(Reads, "up_s", lambda self: WORKER_SILENT_S)
    assert set(stalls(store)) == {"queue_unserved", "lease_held"}
    assert "a worker has died" in LeasesLost(store).text(batch)
    assert QueueWorkers(store, QUEUE).text().startswith("no worker serves queue warmq any more")


def test_a_client_that_may_not_call_info_counts_the_whole_silence(own: RedisServer) -> None:
    client = own.client()
    client.execute_command("ACL", "SETUSER", "default", "-info")
    store = BatchStore(client, ttl_ms=60_000)
    announce(store, silent_s=22)
    assert store.up_s() == float("inf")
    assert store.workers(QUEUE) == []


def test_an_outage_without_a_restart_counts_too(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_REPORT_AFTER_S", 0.0)
    told: list[str] = []
    waits = outage.Outage(60, told.append)
    store = BatchStore(connect(redis_url, "test", retry=waits), ttl_ms=60_000)
    assert waits.back_at is None
    replies: list[Any] = [exceptions.ConnectionError("gone"), b"there"]

    def call() -> Any:
        if isinstance(reply := replies.pop(0), Exception):
            raise reply
        return reply

    waits.call_with_retry(call, lambda error, count: None, with_failure_count=True)
    assert told[-1].startswith("Redis is back")
    assert store.up_s() < 10
    monkeypatch.setattr(waits, "back_at", time.monotonic() - 0.1)
    assert store.up_s() < 1


def test_leases_that_no_sweep_may_return_yet_wait_for_that_too(store: BatchStore) -> None:
    submit_batch(store, 5)
    dead = Lessee(client_of(store), "celery@dead.7.1")
    leases = dead.pop(2)
    dead.expire_leases(*leases)
    assert stalls(store)["lease_held"].sentence().endswith("another worker runs (celery@dead.7.1)")
    announce(store)
    assert "any moment" in stalls(store)["lease_held"].sentence()
    client_of(store).hset(keys.SWEEP, "hold", store.now_ms() + 20_000)
    held = stalls(store)["lease_held"]
    assert 15 < held.facts["left_s"] <= 20
    assert f"for at most 0:00:{held.facts['left_s']}" in held.sentence()


def test_the_time_left_of_a_batch_waits_for_its_leases_but_that_of_others_does_not(
    store: BatchStore,
) -> None:
    work(store)
    announce(store, slots=4)
    submit_batch(store, 4, batch_id="other")
    own = Lessee(client_of(store), "celery@a.12.0a1b2c3d").pop(4)
    submit_batch(store, 2, batch_id="b1")
    assert len(own) == 4
    Lessee(client_of(store), "celery@dead.7.1").pop(2)
    client_of(store).hset(keys.SWEEP, "hold", store.now_ms() + 100_000)
    reads = OutlookReads.using(store)
    assert 95 < (reads.batch_seconds_left(state(store, "b1")) or 0) < 110
    assert 0 < (reads.batch_seconds_left(state(store, "other")) or 0) < 20


def test_the_time_left_of_a_capped_tenant_is_that_of_its_slots(store: BatchStore) -> None:
    work(store)
    announce(store, slots=40)
    submit_batch(store, 400, tenant="lab")
    reads, batch = OutlookReads.using(store), state(store, "b1")
    assert reads.batch_seconds_left(batch) == pytest.approx(10)  # 400 tokens a second
    Tenants.using(store).set_tenant(Tenant("lab", max_in_flight=2))
    assert reads.batch_seconds_left(batch) == pytest.approx(200)
    submit_batch(store, 400, batch_id="b2")
    assert reads.batch_seconds_left(state(store, "b2")) == pytest.approx(20)


def test_a_queue_without_room_is_a_stall(store: BatchStore) -> None:
    announce(store)
    submit_batch(store, 3)
    assert stalls(store, high_water_requests=3)["queue_full"].facts["waiting"] == 3
    assert stalls(store, high_water_requests=4) == {}


@pytest.mark.parametrize("full", [False, True])
def test_a_submit_that_stopped_is_a_stall_unless_redis_is_full(
    store: BatchStore, full: bool
) -> None:
    announce(store)
    submit_batch(store, 3, seal=False)
    batch = store.batch("b1")
    assert batch is not None
    client_of(store).hset(keys.batch_key("b1"), "lines_at", batch.number("lines_at") - 60_000)
    found = stalls(store, high_water_requests=3 if full else 100)
    assert set(found) == ({"queue_full"} if full else {"submit_stopped"})


def test_each_chunk_of_lines_is_noted_with_its_time(store: BatchStore) -> None:
    before = store.now_ms()
    submit_batch(store, 3, seal=False)
    batch = store.batch("b1")
    assert batch is not None
    assert before <= batch.number("lines_at") <= store.now_ms()


def test_status_says_what_stalls_a_batch_with_its_remedy(redis_url: str, store: BatchStore) -> None:
    submit_batch(store, 3, queue="warmq.gpt-4")
    done = run_producer("status", "b1", redis_url=redis_url)
    assert "!! no worker serves gpt-4 (queue warmq.gpt-4); requests waiting: 3" in done.stdout
    assert "start a worker for it" in done.stdout


def test_status_and_doctor_mark_a_stall_alike(redis_url: str, store: BatchStore) -> None:
    submit_batch(store, 3)
    for worker_state, mark in (("draining", "!!"), ("starting", "--")):
        announce(store, state=worker_state)
        for command in (("status", "b1"), ("doctor",)):
            shown = run_producer(*command, redis_url=redis_url).stdout.splitlines()
            (line,) = [one for one in shown if "requests waiting: 3" in one]
            assert line.startswith(f"{mark} "), (state, command)


def test_status_as_json_has_the_stalls_with_their_remedies(
    redis_url: str, store: BatchStore
) -> None:
    def found() -> dict[str, Any]:
        shown = as_json(run_producer("status", "b1", "--json", redis_url=redis_url))
        return {one["code"]: one for one in shown["stalls"]}

    submit_batch(store, 3)
    stall = found()["queue_unserved"]
    assert "requests waiting: 3" in stall["message"]
    assert "WARMQ_SERVED_MODEL_NAME" in stall["remedy"]
    assert stall["passing"] is False
    announce(store, state="starting")
    assert found()["workers_starting"]["passing"] is True
    announce(store)
    assert found() == {}
    store.cancel(store.batches()[0])
    assert found() == {}
