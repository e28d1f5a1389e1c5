"""Whose turn it is: tenants share by weight in tokens, and a tenant's batches share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
import pytest
import redis
from kit.commands.support import run_producer
from kit.protocol.lessee import QUEUE, Lease, Lessee, celery_message, chat, submit_batch

from contract import naming
from contract.message import read_delivery
from contract.redis.batches import BatchStore
from contract.redis.tenants import Tenant
from contract.results import success_meta


def batches_of(leases: list[Lease]) -> list[str]:
    """Return the batch of each lease, in the order in which they were popped."""
    return [
        orjson.loads(lease.message)["headers"].get("warmq", {}).get("batch", "") for lease in leases
    ]


def answer(worker: Lessee, leases: list[Lease], tokens: dict[str, int]) -> None:
    """Complete leases, each with the tokens of its batch's requests."""
    args: list[Any] = []
    for lease in leases:
        delivery = read_delivery(lease.id, lease.message)
        meta = success_meta(delivery, b"{}", {})
        used = tokens.get(delivery.batch, 10)
        args += [lease.id, delivery.request_id, delivery.batch, delivery.life, "completed", 0]
        args += [used - 3, 3, meta]
    worker.run("done", worker.worker, worker.ttl_ms, *args)


def serve(
    worker: Lessee, rounds: int, k: int, tokens: dict[str, int], slots: int = 64
) -> list[str]:
    """Pop and answer; return the batches served, in order."""
    served: list[str] = []
    for _ in range(rounds):
        leases = worker.pop(k, slots=slots)
        served += batches_of(leases)
        answer(worker, leases, tokens)
    return served


def turn_keys(client: redis.Redis) -> set[str]:
    """Return the keys of the rings, those that remember who left apart."""
    names = {key.decode() for key in client.scan_iter(f"{naming.turns_key(QUEUE)}\x06*")}
    return {name for name in names if not name.endswith(":left")}


def test_a_tenant_that_comes_later_shares_from_its_first_request(
    store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 2000, batch_id="big", tenant="a")
    serve(worker, 10, 32, {})
    submit_batch(store, 320, batch_id="small", tenant="b")
    served = serve(worker, 20, 32, {})
    assert served.index("small") <= 32
    assert Counter(served) == {"big": 320, "small": 320}


def test_who_was_served_alone_shares_with_whoever_comes_before_it_returns(
    store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 640, batch_id="alone", tenant="a")
    serve(worker, 20, 32, {})
    submit_batch(store, 2000, batch_id="new", tenant="b")
    serve(worker, 1, 32, {})
    submit_batch(store, 2000, batch_id="again", tenant="a")
    served = Counter(serve(worker, 20, 32, {}))
    assert served["again"] == pytest.approx(served["new"], abs=64)


def test_tokens_are_shared_and_not_requests(store: BatchStore, worker: Lessee) -> None:
    tokens = {"short": 10, "long": 100}
    for name in tokens:
        submit_batch(store, 4000, batch_id=name, tenant=f"of-{name}")
    served = Counter(serve(worker, 100, 32, tokens))
    used = {name: served[name] * tokens[name] for name in tokens}
    assert used["short"] == pytest.approx(used["long"], rel=0.15)


def test_shares_are_proportional_to_weights(store: BatchStore, worker: Lessee) -> None:
    weights = {"one": 1, "two": 2, "four": 4}
    for name, weight in weights.items():
        store.set_tenant(Tenant(name, weight))
        submit_batch(store, 3000, batch_id=name, tenant=name)
    served = Counter(serve(worker, 140, 32, {}))
    for name, weight in weights.items():
        assert served[name] == pytest.approx(140 * 32 * weight / 7, rel=0.05)


def test_a_weight_acts_on_what_is_queued_already(store: BatchStore, worker: Lessee) -> None:
    for name in ("a", "b"):
        submit_batch(store, 2000, batch_id=name, tenant=name)
    before = Counter(serve(worker, 20, 32, {}))
    assert before["a"] == before["b"]
    store.set_tenant(Tenant("a", 3))
    after = Counter(serve(worker, 40, 32, {}))
    assert after["a"] == pytest.approx(3 * after["b"], rel=0.1)


def test_batches_of_one_tenant_share(store: BatchStore, worker: Lessee) -> None:
    submit_batch(store, 1000, batch_id="big")
    serve(worker, 4, 32, {})
    submit_batch(store, 64, batch_id="small")
    assert Counter(serve(worker, 4, 32, {})) == {"big": 64, "small": 64}


def test_batches_that_keep_their_order_run_one_after_the_other(
    store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 100, batch_id="first", fifo=True)
    submit_batch(store, 100, batch_id="second", fifo=True)
    submit_batch(store, 100, batch_id="shares")
    served = serve(worker, 20, 32, {})
    assert [name for name in served if name != "shares"] == ["first"] * 100 + ["second"] * 100
    assert "shares" in served[:96]


def test_a_tenant_that_was_away_has_no_credit_and_no_penalty(
    store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 64, batch_id="early", tenant="away")
    serve(worker, 2, 32, {})
    submit_batch(store, 4000, batch_id="busy", tenant="busy")
    serve(worker, 40, 32, {})
    submit_batch(store, 640, batch_id="late", tenant="away")
    assert Counter(serve(worker, 20, 32, {})) == {"busy": 320, "late": 320}


def test_who_empties_its_list_each_time_gets_no_more_than_its_share(
    store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 2000, batch_id="steady", tenant="z")
    served: Counter[str] = Counter()
    for n in range(20):
        submit_batch(store, 32, batch_id=f"drip-{n}", tenant="a")
        served.update(name.partition("-")[0] for name in serve(worker, 2, 32, {}))
    assert served["drip"] <= served["steady"] + 64


def test_plain_celery_clients_are_one_tenant(
    redis_client: redis.Redis, store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 320, batch_id="b", priority=0)
    redis_client.lpush(QUEUE, *(celery_message(f"plain-{n}") for n in range(320)))
    served = Counter(serve(worker, 10, 32, {}))
    assert served == {"b": 160, "": 160}


def test_a_higher_priority_is_served_first_whoever_waits_below(
    store: BatchStore, worker: Lessee
) -> None:
    submit_batch(store, 100, batch_id="low", tenant="a", priority=9)
    submit_batch(store, 40, batch_id="high", tenant="b", priority=3)
    assert serve(worker, 2, 32, {})[:41] == ["high"] * 40 + ["low"]


def test_a_turn_is_a_run_of_neighbours_also_over_several_pops(
    store: BatchStore, worker: Lessee
) -> None:
    for name in ("a", "b"):
        submit_batch(store, 100, batch_id=name, tenant=name)
    served = serve(worker, 64, 1, {}, slots=32)
    assert served == ["a"] * 32 + ["b"] * 32


def test_a_turn_is_no_longer_than_the_slots(store: BatchStore, worker: Lessee) -> None:
    for name in ("a", "b"):
        submit_batch(store, 100, batch_id=name, tenant=name)
    assert serve(worker, 16, 1, {}, slots=4) == (["a"] * 4 + ["b"] * 4) * 2


def test_a_capped_tenant_has_no_more_in_flight_and_others_fill_the_slots(
    store: BatchStore, worker: Lessee
) -> None:
    store.set_tenant(Tenant("capped", max_in_flight=5))
    submit_batch(store, 100, batch_id="capped", tenant="capped")
    submit_batch(store, 100, batch_id="other", tenant="other")
    leases = worker.pop(60)
    assert Counter(batches_of(leases)) == {"capped": 5, "other": 55}
    loads = store.tenant_loads(QUEUE)
    assert (loads["capped"].in_flight, loads["capped"].waiting) == (5, 95)
    answer(worker, [lease for lease in leases if batches_of([lease]) == ["capped"]][:2], {})
    worker.pop(45)
    assert store.tenant_loads(QUEUE)["capped"].in_flight == 5


def test_a_cap_that_is_raised_acts_on_what_waits(store: BatchStore, worker: Lessee) -> None:
    store.set_tenant(Tenant("capped", max_in_flight=1))
    submit_batch(store, 10, batch_id="b", tenant="capped")
    assert len(worker.pop(10)) == 1
    assert worker.pop(10) == []
    store.set_tenant(Tenant("capped", max_in_flight=4))
    worker.sweep()
    assert len(worker.pop(10)) == 3
    store.delete_tenant("capped")
    worker.sweep()
    assert len(worker.pop(10)) == 6


@pytest.mark.parametrize(
    "way", ["done", "failed", "released", "died", "swept", "buried", "deleted"]
)
def test_whatever_ends_a_lease_frees_its_place_under_the_cap(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis, way: str
) -> None:
    store.set_tenant(Tenant("capped", max_in_flight=3))
    submitted = submit_batch(store, 9, batch_id="b", tenant="capped")
    leases = worker.pop(9)
    assert len(leases) == 3
    if way == "done":
        worker.done(*leases)
    elif way == "failed":
        worker.done(*leases, outcome="failed", keep=True)
    elif way == "released":
        worker.release(*leases)
    elif way == "died":
        worker.release(*leases, died=leases, max_deaths=1)
    elif way == "swept":
        worker.expire_leases(*leases)
        worker.sweep()
    elif way == "buried":
        for lease in leases:
            worker.bury(lease, "unreadable")
    else:
        store.cancel(submitted.batch)
        store.delete("b", force=True)
        worker.release(*leases)
    load = store.tenant_loads(QUEUE).get("capped")
    assert load is None or not load.in_flight
    again = worker.pop(9)
    assert len(again) == (0 if way == "deleted" else 3)


def test_what_comes_back_is_not_charged_twice_unless_it_killed_an_engine(
    store: BatchStore, worker: Lessee
) -> None:
    for name in ("a", "b"):
        submit_batch(store, 200, batch_id=name, tenant=name)
    for _ in range(5):
        worker.release(*worker.pop(32))
    served = Counter(serve(worker, 6, 32, {}))
    assert served == {"a": 96, "b": 96}


def test_nothing_of_the_turns_is_left_when_nothing_waits(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis
) -> None:
    for name in ("a", "b"):
        submit_batch(store, 50, batch_id=name, tenant=name)
    serve(worker, 4, 32, {})
    assert turn_keys(redis_client) == set()
    counters = redis_client.hgetall(naming.turns_key(QUEUE))
    assert counters.keys() - {b"mean"} <= {b"waiting"}
    assert counters.get(b"waiting", b"0") == b"0"


def test_retried_requests_and_dead_letters_get_turns_again(
    store: BatchStore, worker: Lessee
) -> None:
    submitted = submit_batch(store, 4, batch_id="b", tenant="t")
    leases = worker.pop()
    worker.done(*leases[:3], outcome="failed", keep=True)
    worker.release(leases[3], died=[leases[3]], max_deaths=1)
    (suspect,) = worker.pop(lists=[f"{QUEUE}:suspects"])
    worker.release(suspect, died=[suspect], max_deaths=1)
    (again,) = worker.pop(lists=[f"{QUEUE}:suspects"])
    worker.release(again, died=[again], max_deaths=1)
    assert len(list(store.dead_letters())) == 1
    assert worker.pop() == []
    assert store.retry(submitted.batch, ["failed"]) >= 3
    store.retry_dead()
    assert len(worker.pop()) == 4


def test_a_queue_that_is_purged_gives_its_turns_up(
    store: BatchStore, worker: Lessee, redis_client: redis.Redis
) -> None:
    submitted = submit_batch(store, 40, batch_id="purged", tenant="a")
    submit_batch(store, 40, batch_id="kept", tenant="b")
    redis_client.delete(submitted.list_key)
    assert serve(worker, 3, 32, {}) == ["kept"] * 40
    assert turn_keys(redis_client) == set()


@pytest.mark.parametrize("workers", [2, 4])
def test_lines_of_one_document_stay_with_one_worker(
    redis_client: redis.Redis, store: BatchStore, workers: int
) -> None:
    documents, questions = 240, 5
    bodies = [chat(f"document {n // questions}") for n in range(documents * questions)]
    submit_batch(store, bodies=bodies)
    fleet = [Lessee(redis_client, f"w{n}") for n in range(workers)]
    hits, seen = 0, [set[str]() for _ in fleet]
    while any(found := [worker.pop(32, slots=256) for worker in fleet]):
        for leases, known in zip(found, seen, strict=True):
            for lease in leases:
                prompt = orjson.loads(orjson.loads(lease.message)["body"])[0][0]["messages"]
                hits += str(prompt) in known
                known.add(str(prompt))
    # Of the four lines in five that one worker alone would find in its prefix cache
    assert hits >= 0.95 * documents * (questions - 1)


@pytest.mark.parametrize("weight", ["nan", "inf", "0", "-1", "1001"])
def test_a_weight_that_is_no_share_is_refused(
    redis_url: str, store: BatchStore, weight: str
) -> None:
    done = run_producer("tenant", "set", "t", "--weight", weight, redis_url=redis_url)
    assert done.returncode == 2
    assert "--weight" in done.stderr
    assert store.tenants() == []
