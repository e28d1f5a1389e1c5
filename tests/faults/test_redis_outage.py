"""Redis goes away and comes back: nothing lost, nothing computed twice, nobody hangs or spins."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from kit.commands.support import batch_file, producer_command, producer_env
from kit.redis_servers.outage import (
    assert_settled,
    finished,
    in_flight,
    inspect,
    neither_hung_nor_spinning,
    recomputed,
    simulated,
    spread,
    starts,
    stay,
    store_of,
    submit_sleepers,
)

from contract.redis import keys
from demo.stack import RedisServer, eventually

pytestmark = pytest.mark.timeout(150)

IN_FLIGHT = 256


def test_a_restart_with_256_in_flight_computes_nothing_twice(
    server: RedisServer, tmp_path: Path
) -> None:
    store = store_of(server)
    with simulated(server.url, tmp_path) as worker:
        submitted, bodies = submit_sleepers(store, spread(IN_FLIGHT, 1, 5))
        in_flight(tmp_path, IN_FLIGHT)
        with neither_hung_nor_spinning(worker):
            server.stop()
            stay(3)
            server.start()
            finished(store, submitted.id)
        assert inspect(server.url)["warmq"]["state"] == "ready"
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


@pytest.mark.parametrize("fsync", ["everysec", pytest.param("always", marks=pytest.mark.slow)])
def test_a_killed_redis_loses_nothing_that_it_had_acknowledged(fsync: str, tmp_path: Path) -> None:
    options = ("--appendonly", "yes", "--appendfsync", fsync)
    with RedisServer(tmp_path / "redis", *options) as server:
        store = store_of(server)
        with simulated(server.url, tmp_path) as worker:
            submitted, bodies = submit_sleepers(store, spread(IN_FLIGHT, 0.5, 5))
            in_flight(tmp_path, IN_FLIGHT)
            with neither_hung_nor_spinning(worker):
                server.stop(signal.SIGKILL)
                stay(2)
                server.start()
                finished(store, submitted.id)
        assert recomputed(tmp_path) == 0
        assert_settled(store, submitted, bodies)


@pytest.mark.slow
def test_an_outage_longer_than_the_lease_computes_nothing_twice(
    server: RedisServer, tmp_path: Path
) -> None:
    store = store_of(server)
    with simulated(server.url, tmp_path, lease_s=2) as worker:
        submitted, bodies = submit_sleepers(store, spread(64, 1, 10))
        in_flight(tmp_path, 64)
        with neither_hung_nor_spinning(worker):
            server.stop()
            stay(5)
            server.start()
            finished(store, submitted.id)
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


def test_a_redis_that_stands_still_for_longer_than_the_lease_costs_nothing(
    server: RedisServer, tmp_path: Path
) -> None:
    store = store_of(server)
    assert server.process is not None
    with simulated(server.url, tmp_path, lease_s=2) as worker:
        submitted, bodies = submit_sleepers(store, spread(64, 1, 7))
        in_flight(tmp_path, 64)
        with neither_hung_nor_spinning(worker):
            os.kill(server.process.pid, signal.SIGSTOP)
            stay(4)
            os.kill(server.process.pid, signal.SIGCONT)
            finished(store, submitted.id)
        assert inspect(server.url)["warmq"]["state"] == "ready"
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


@pytest.mark.slow
def test_paused_clients_go_on_where_they_were(server: RedisServer, tmp_path: Path) -> None:
    store = store_of(server)
    with simulated(server.url, tmp_path, lease_s=2):
        submitted, bodies = submit_sleepers(store, spread(64, 1, 8))
        in_flight(tmp_path, 64)
        server.client().client_pause(4000)
        finished(store, submitted.id)
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


def test_dropped_connections_are_opened_again_at_once(server: RedisServer, tmp_path: Path) -> None:
    store, client = store_of(server), server.client()
    with simulated(server.url, tmp_path):
        submitted, bodies = submit_sleepers(store, spread(IN_FLIGHT, 1, 4))
        in_flight(tmp_path, IN_FLIGHT)
        stop = threading.Event()

        def drop() -> None:
            while not stop.wait(0.5):
                for kind in ("normal", "pubsub"):
                    client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

        dropper = threading.Thread(target=drop)
        dropper.start()
        try:
            finished(store, submitted.id)
        finally:
            stop.set()
            dropper.join()
        assert inspect(server.url)["warmq"]["state"] == "ready"
    assert recomputed(tmp_path) == 0
    assert_settled(store, submitted, bodies)


def test_a_producer_that_waits_rides_out_a_restart(server: RedisServer, tmp_path: Path) -> None:
    file = batch_file(tmp_path / "in.jsonl", 40)
    command = producer_command("submit", file, "-o", tmp_path / "out.jsonl")
    with (
        simulated(server.url, tmp_path, simulated_slots=4, simulated_latency_s=0.5),
        subprocess.Popen(
            command, env=producer_env(server.url), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as submit,
    ):
        in_flight(tmp_path, 4)
        server.stop()
        stay(3)
        server.start()
        _, told = submit.communicate(timeout=60)
    assert submit.returncode == 0, told
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 40
    assert recomputed(tmp_path) == 0


def test_an_idle_worker_wakes_for_work_that_comes_after_a_restart(
    server: RedisServer, tmp_path: Path
) -> None:
    store = store_of(server)
    with simulated(server.url, tmp_path, lease_s=60) as worker:
        first, bodies = submit_sleepers(store, [0.01] * 4)
        finished(store, first.id)
        server.stop(signal.SIGKILL)
        log = worker.log_path
        eventually(lambda: b"waiting for it" in log.read_bytes(), 10, "it says what it misses")
        server.start()
        eventually(lambda: b"Redis is back" in log.read_bytes(), 10, "and that it is back")
        second, more = submit_sleepers(store, [0.01] * 4, "b2")
        finished(store, second.id)
    assert_settled(store, first, bodies)
    assert_settled(store, second, more)


def test_a_cancel_after_a_restart_reaches_running_work(server: RedisServer, tmp_path: Path) -> None:
    store = store_of(server)
    with simulated(server.url, tmp_path):
        submitted, _ = submit_sleepers(store, [600] * 8)
        in_flight(tmp_path, 8)
        server.stop()
        server.start()
        client = server.client()
        eventually(lambda: client.pubsub_numsub(keys.CANCEL_CHANNEL)[0][1], 15, "subscribed again")
        assert store.cancel(submitted.batch) == 8
        eventually(lambda: not client.zcard(keys.LEASES), 10, "the work is aborted")
    assert finished(store, submitted.id).number("cancelled") == 8


def test_a_worker_that_starts_before_redis_waits_for_it(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    with simulated(server.url, tmp_path) as worker:
        eventually(lambda: b"ready in" in worker.log_path.read_bytes(), 30, "the engine is up")
        stay(1)
        with server:
            store = store_of(server)
            submitted, bodies = submit_sleepers(store, [0.01] * 8)
            finished(store, submitted.id)
            assert inspect(server.url)["warmq"]["state"] == "ready"
            assert_settled(store, submitted, bodies)
            assert worker.stop() == 0


def test_flushed_scripts_are_loaded_again(server: RedisServer, tmp_path: Path) -> None:
    store = store_of(server)
    with simulated(server.url, tmp_path):
        submitted, bodies = submit_sleepers(store, spread(64, 0.5, 2))
        in_flight(tmp_path, 64)
        server.client().script_flush()
        finished(store, submitted.id)
        second, more = submit_sleepers(store, [0.01] * 4, "b2")
        finished(store, second.id)
    assert sum(starts(tmp_path).values()) == 68
    assert_settled(store, submitted, bodies)
    assert_settled(store, second, more)
