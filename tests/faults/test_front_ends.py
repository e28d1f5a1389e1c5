"""A worker of several processes over one engine: to everybody outside it is one worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
from kit.campaigns.campaign_real import front_ends, holds_leases
from kit.protocol.lessee import celery_message, chat, client_of, stored
from kit.stacks.celery_side import client_app, in_flight, send, stats
from kit.stacks.stage import LEASE_S, Stage, stage
from kit.stacks.started_as import runs

from contract import naming
from contract.redis import keys
from demo.stack import Worker, eventually

HELD = 16 + 4


def started(on: Stage, **settings: object) -> tuple[Worker, psutil.Process]:
    """Return a worker with two front ends, both ready, and the process of the second."""
    worker = on.worker(front_ends=2, **settings)
    eventually(lambda: on.announced(worker).get("slots") == 16, 40, "both announce their slots")
    (other,) = front_ends(worker)
    return worker, other


def test_a_killed_front_end_costs_what_it_held_and_is_followed_by_another(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker, victim = started(on)
        on.submit(600)
        eventually(lambda: on.computed().began_on(victim.pid), 20, "it computes requests")
        victim.kill()
        eventually(lambda: [p for p in front_ends(worker) if p.pid != victim.pid], 20, "another")
        on.finish()
        (another,) = front_ends(worker)
        assert on.computed().began_on(worker.pid)
        assert on.computed().began_on(another.pid), "it works, too"
        assert 0 < on.computed().again <= HELD
        assert "front end 2 has died" in worker.log_path.read_text()
        assert worker.stop() == 0
        assert not runs(another)
        on.settled()


def test_requests_of_many_sequences_are_shared_by_front_ends_and_end_once(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker, victim = started(on)
        on.submit([chat(f"question {n}", n=(1, 3, 8, 40)[n % 4]) for n in range(300)])
        client = client_of(on.store)
        eventually(lambda: on.computed().began_on(victim.pid), 20, "it computes requests")
        eventually(lambda: client.hlen(keys.SEQUENCES) > 0, 20, "some of many are in flight")
        victim.kill()
        on.finish()
        (another,) = front_ends(worker)
        assert on.computed().began_on(another.pid), "what follows works, too"
        eventually(lambda: not client.exists(keys.SEQUENCES), 10, "none is counted any more")
        held = client.hget(naming.turns_key(naming.DEFAULT_QUEUE), "in_flight:default")
        assert int(held or 0) == 0
        assert worker.stop() == 0
        on.settled()


def test_front_ends_of_a_killed_worker_hand_back_and_end(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker, other = started(on, simulated_latency_s=1)
        on.submit(100)
        eventually(lambda: holds_leases(on, other), 20, "it has requests in flight")
        on.kill(worker)
        eventually(lambda: not runs(other), LEASE_S + 10, "it ends with its worker")
        assert on.worker().pid
        on.finish()
        on.settled()


def test_a_stop_lets_all_front_ends_finish_within_the_drain_timeout(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker, other = started(on)
        on.submit(300)
        eventually(lambda: holds_leases(on, other), 20, "both work")
        assert worker.stop() == 0
        assert not runs(other)
        assert on.computed().again == 0
        assert client_of(on.store).zcard(keys.LEASES) == 0, "nothing is left to a sweep"
        log = worker.log_path.read_text()
        assert log.count("0 are back in the queue") < 2, "look-ahead is handed back"
        assert log.count("drained: ") == 2
        on.worker()
        on.finish()
        on.settled()


def test_a_front_end_that_is_told_to_end_by_itself_hands_back_and_is_followed(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as on:
        worker, other = started(on)
        on.submit(400)
        eventually(lambda: holds_leases(on, other), 20, "it works")
        other.send_signal(signal.SIGTERM)
        eventually(lambda: not runs(other), 20, "it drains")
        on.finish()
        assert on.computed().again == 0
        with client_app(on.server.url) as app:
            # Also what the one that has ended had done.
            eventually(lambda: stats(app)["counts"]["completed"] == 400, 20, "all are counted", 0.2)
        assert worker.stop() == 0
        on.settled()


def test_a_poison_is_found_although_several_front_ends_meet_it(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker, _ = started(on, drain_timeout_s=5)
        bodies = [chat(f"question {n}") for n in range(60)]
        bodies[30]["user"] = "simulate:die"
        on.submit(bodies)
        on.finish(timeout_s=90)
        assert worker.stop() == 0
        on.settled(failed={"c31": "poison"})


def test_celery_sees_one_worker_with_all_that_is_in_flight(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker, other = started(on)
        with client_app(on.server.url) as app:
            bodies = [chat(f"{n}", user="simulate:sleep=600") for n in range(18)]
            sent = {send(app, body).id for body in bodies}
            eventually(lambda: in_flight(app) == sent, 20, "all are listed", 0.2)
            eventually(lambda: stats(app)["in_flight"] == 18, 20, "and counted", 0.2)
            known = stats(app)
            assert (known["front_ends"], known["max_num_seqs"], known["in_flight_limit"]) == (
                2, 16, 16 + 4,
            )  # fmt: skip
            assert holds_leases(on, other)
            assert len(app.control.inspect(timeout=1).ping()) == 1
            app.control.revoke(list(sent))
            eventually(lambda: stats(app)["in_flight"] == 0, 20, "all are revoked", 0.2)
            assert stats(app)["counts"]["cancelled"] == 18
        (found,) = on.store.workers(naming.DEFAULT_QUEUE)
        assert (found["slots"], found["limit"]) == (16, 20)
        os.kill(worker.pid, signal.SIGQUIT)
        assert worker.process is not None
        assert worker.process.wait(30) == 0
        assert not runs(other)


def test_a_front_end_that_is_suspended_is_killed_and_followed_by_another(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker, victim = started(on)
        on.submit(600)
        eventually(lambda: on.computed().began_on(victim.pid), 20, "it computes requests")
        victim.suspend()
        eventually(lambda: [p for p in front_ends(worker) if p.pid != victim.pid], 60, "another")
        assert not runs(victim)
        on.finish()
        assert 0 < on.computed().again <= HELD
        assert "front end 2 is killed: it is suspended" in worker.log_path.read_text()
        assert worker.stop() == 0
        on.settled()


def test_a_worker_that_stops_does_not_wait_for_a_suspended_front_end(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker, victim = started(on)
        victim.suspend()
        assert worker.stop() == 0
        assert not runs(victim)


def test_suspects_run_although_a_front_end_was_suspended_while_it_started(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = on.worker(front_ends=2)
        (victim,) = eventually(lambda: front_ends(worker), 40, "it begins to start", 0.001)
        victim.suspend()
        assert on.announced(worker).get("slots") != 16, "it has told nothing yet"
        client_of(on.store).lpush(keys.suspects_list(naming.DEFAULT_QUEUE), celery_message("one"))
        on.submit(60)
        on.finish()
        eventually(lambda: stored(client_of(on.store), "one"), 60, "the suspect has run")
        eventually(lambda: [p for p in front_ends(worker) if p.pid != victim.pid], 60, "another")
        assert worker.stop() == 0
        assert not runs(victim)
