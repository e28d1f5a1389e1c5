"""Several models on one worker: what waits is answered by its model, whatever is killed when."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from kit.protocol.lessee import chat, client_of
from kit.stacks.stage import Stage, stage

from contract.redis import keys
from contract.redis.tenants import Tenant
from contract.settings import Settings
from demo.stack import Worker, eventually
from producer.stalls import StallReads

MODELS = ("alpha", "beta", "gamma")
#: Stays so short that the tests see many swaps.
ENTRY = {"min_stay": "1s", "max_wait": "2s"}


def start(on: Stage, **settings: object) -> Worker:
    models = json.dumps(dict.fromkeys(MODELS, ENTRY))
    return on.worker(models=models, simulated_process=True, **settings)


def announced(on: Stage, worker: Worker) -> dict[str, object]:
    """Return what a worker says of itself, whatever queue it serves."""
    found = [w for w in on.store.announcements() if w["id"].split(".")[-2] == str(worker.pid)]
    return found[-1] if found else {}


def submit(on: Stage, count: int) -> list[str]:
    """Queue a batch for each model, whose lines name the model that must answer them."""
    batches = []
    for model in MODELS:
        bodies = [chat(f"question {n} of {model}") | {"model": model} for n in range(count)]
        on.submit(bodies, f"b-{model}", queue=f"warmq.{model}")
        batches.append(f"b-{model}")
    return batches


def settle(on: Stage, batches: list[str]) -> None:
    for batch in batches:
        on.finish(batch, 120)
    for batch in batches:
        on.settled(batch)


def test_one_worker_answers_the_batches_of_three_models(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on)
        batches = submit(on, 200)
        served: set[object] = set()

        def all_served() -> bool:
            found = announced(on, worker)
            if found.get("state") == "ready":
                assert found["models"] == {name: f"warmq.{name}" for name in MODELS}
                served.add(found["served"])
            return len(served) == len(MODELS)

        eventually(all_served, 60, "a stay of each model")
        settle(on, batches)
        assert worker.stop() == 0
        # A line that names another model than its queue's would have failed: model_not_found.
        # A swap may hand back what runs, at most what is in the slots.
        swaps = worker.log_path.read_text().count("swapping from model")
        assert on.computed().again <= 16 * swaps


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_worker_that_is_killed_while_it_swaps_loses_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with stage(tmp_path) as on:
        worker = start(on)
        batches = submit(on, 250)
        for _ in range(4):
            phase = rng.choice(["swapping", "starting", "ready"])
            if phase != "ready":  # the moments of a swap are short: take the first that is seen
                eventually(
                    lambda worker=worker: announced(on, worker).get("state") not in ("ready", None)
                    or "is loaded" in worker.log_path.read_text(),
                    60, "a swap",
                )  # fmt: skip
            else:
                eventually(lambda worker=worker: announced(on, worker).get("in_flight"), 60, "work")
            on.kill_group(worker) if rng.random() < 0.5 else on.kill(worker)
            worker = start(on)
        settle(on, batches)
        assert worker.stop() == 0


def test_two_workers_do_not_both_swap_to_the_model_that_waits(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        workers = [start(on) for _ in range(2)]
        on.submit([chat(f"q{n}") for n in range(900)], "b-alpha", queue="warmq.alpha")

        def both() -> bool:
            return all(announced(on, w).get("served") == "alpha" for w in workers)

        eventually(both, 60, "both serve alpha")
        on.submit([chat(f"q{n}") for n in range(12)], "b-beta", queue="warmq.beta")
        on.finish("b-beta", 60)
        swaps = sum(w.log_path.read_text().count("from model alpha to beta") for w in workers)
        assert swaps == 1
        on.finish("b-alpha", 120)
        for batch in ("b-alpha", "b-beta"):
            on.settled(batch)


def test_a_stop_in_a_swap_ends_the_worker(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on)
        batches = submit(on, 200)
        eventually(lambda: "swapping from model" in worker.log_path.read_text(), 60, "a swap")
        assert worker.stop() == 0
        again = start(on)
        settle(on, batches)
        assert again.stop() == 0


def test_an_online_request_makes_a_busy_worker_swap(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        entry = {"min_stay": "1s", "max_wait": "10m", "max_online_wait": "1s"}
        worker = on.worker(models=json.dumps(dict.fromkeys(MODELS, entry)), simulated_process=True)
        on.submit([chat(f"q{n}") for n in range(2000)], "b-alpha", queue="warmq.alpha")
        eventually(lambda: announced(on, worker).get("in_flight"), 60, "work")
        on.submit([chat("now")], "b-beta", queue="warmq.beta", priority=0, fifo=True)
        on.finish("b-beta", 40)
        assert "an online request waits" in worker.log_path.read_text()


def test_a_model_that_cannot_be_loaded_stops_no_other(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        entries = {"alpha": ENTRY, "beta": ENTRY | {"path": "simulate:fail"}, "gamma": ENTRY}
        worker = on.worker(models=json.dumps(entries), simulated_process=True)
        submit(on, 100)
        for good in ("b-alpha", "b-gamma"):
            on.finish(good, 120)
            on.settled(good)
        eventually(lambda: announced(on, worker).get("unloadable"), 60, "the failure")
        found = announced(on, worker)
        assert set(found["unloadable"]) == {"beta"}
        assert "simulated failure to load" in found["unloadable"]["beta"]["why"]
        bad = on.store.batch("b-beta")
        assert bad is not None
        assert bad.terminal == 0
        stalls = StallReads.using(on.store).stalls(Settings(), ["warmq.beta"], [bad])
        assert [one.code for one in stalls] == ["model_unloadable"]
        assert "simulated failure to load" in stalls[0].sentence()
        tries = worker.log_path.read_text().count("model beta cannot be loaded")
        assert tries == found["unloadable"]["beta"]["tries"]  # each with a longer pause
        assert worker.stop() == 0
        # With a correct path the same batch is answered.
        again = start(on)
        on.finish("b-beta", 60)
        on.settled("b-beta")
        assert again.stop() == 0


def test_a_long_request_among_idle_slots_does_not_delay_the_other_model(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on)
        on.submit([chat("long") | {"user": "simulate:sleep=8"}], "b-alpha", queue="warmq.alpha")
        eventually(lambda: on.computed().starts, 40, "the long request runs")
        on.submit([chat(f"q{n}") for n in range(4)], "b-beta", queue="warmq.beta")
        on.finish("b-beta", 40)
        alpha = on.store.batch("b-alpha")
        assert alpha is not None and not alpha.finished
        assert "handed back before the swap: 1;" in worker.log_path.read_text()
        settle(on, ["b-alpha", "b-beta"])
        assert on.computed().again == 1  # from then on it is waited for


def test_running_requests_may_end_before_a_swap_within_the_setting(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on, swap_drain_s=0)
        settle(on, submit(on, 100))
        log = worker.log_path.read_text()
        assert "swapping from model" in log and "handed back before" not in log


def test_a_stop_in_a_swap_leaves_neither_claim_nor_announcement(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = start(on, simulated_latency_s=1.5)
        batches = submit(on, 60)
        eventually(lambda: announced(on, worker).get("state") == "swapping", 60, "a swap", 0.005)
        assert worker.stop() == 0
        assert on.store.served_queues() == set()
        assert not client_of(on.store).hlen(keys.SWAP_CLAIMS)
        again = start(on)
        settle(on, batches)
        assert again.stop() == 0


def test_tenants_have_their_shares_over_swaps(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        on.store.set_tenant(Tenant("heavy", 3.0, None))
        worker = start(on, simulated_slots=8)
        for tenant in ("heavy", "light"):
            on.submit(600, f"b-{tenant}", tenant=tenant, queue="warmq.alpha")
        on.submit(600, "b-beta", queue="warmq.beta")
        left = "from model alpha to beta"
        eventually(lambda: worker.log_path.read_text().count(left) >= 3, 90, "three stays of alpha")
        began = on.computed().starts
        heavy, light = (len(began.keys() & set(on.ids(f"b-{t}"))) for t in ("heavy", "light"))
        assert 2.4 <= heavy / light <= 3.6, (heavy, light)
        assert worker.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tenant_with_weight_3_gets_three_times_the_tokens_of_one_of_another_model(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as on:
        on.store.set_tenant(Tenant("x", 3.0))
        for tenant, model in (("x", "alpha"), ("y", "beta")):
            bodies = [chat(f"question {n}") for n in range(20_000)]
            on.submit(bodies, tenant, queue=f"warmq.{model}", tenant=tenant)
        entry = {"min_stay": "1s"}
        on.worker(models=json.dumps({"alpha": entry, "beta": entry}))

        def ended(tenant: str) -> int:
            batch = on.store.batch(tenant)
            return batch.terminal if batch else 0

        # Each stay has the tokens of 20 swaps; a part of one stay less or more does not matter.
        eventually(lambda: ended("x") + ended("y") > 8000, 200, "8,000 answers", 0.5)
        assert 2.0 <= ended("x") / ended("y") <= 4.5
