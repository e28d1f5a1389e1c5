"""A worker in front of an OpenAI-compatible server that is killed, comes back, or goes away."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.protocol.lessee import chat, client_of
from kit.servers.stub_server import StubProcess
from kit.stacks.stage import Stage, stage

from contract.redis import keys
from demo.stack import Worker, eventually


def remote_worker(on: Stage, *servers: StubProcess, **settings: object) -> Worker:
    """Start a worker in front of these servers."""
    urls = ",".join(server.url for server in servers)
    return on.worker(engine="openai", openai_base_urls=urls, **settings)


@contextmanager
def restarted_when_dead(server: StubProcess) -> Iterator[list[int]]:
    """Start a server again each time it has died; yields the exit codes."""
    over, codes = threading.Event(), []

    def watch() -> None:
        while not over.wait(0.05):
            if server.process is not None and (code := server.process.poll()) is not None:
                codes.append(code)
                server.start()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield codes
    finally:
        over.set()
        thread.join()


def test_500_requests_are_answered_once_each_by_a_server_killed_and_restarted_twice(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as on:
        server = StubProcess("--slots", 16, "--latency-s", 0.1, "--log", on.engine_log)
        with server:
            worker = remote_worker(on, server, openai_concurrency=24)
            on.ready(worker)
            on.submit(500)
            for so_far in (100, 250):
                on.running(so_far)
                server.kill()
                eventually(lambda: on.announced(worker)["state"] == "degraded", 10, "degraded")
                server.start()
            on.finish()
            assert worker.stop() == 0
            on.settled()
            assert on.computed().again <= 2 * 16


def test_a_request_that_kills_its_server_each_time_is_found_and_the_others_are_answered(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as on:
        server = StubProcess("--slots", 8, "--latency-s", 0.1, "--log", on.engine_log)
        with server, restarted_when_dead(server) as codes:
            worker = remote_worker(on, server, openai_concurrency=8, look_ahead=0)
            on.ready(worker)
            bodies = [chat(f"q{n}") for n in range(40)]
            bodies[10] = chat("poison", user="stub:die")
            on.submit(bodies)
            on.finish()
            assert worker.stop() == 0
            on.settled(failed={"c11": "poison"})
            assert 3 <= len(codes) <= 2 + math.log2(8) + 1


def test_a_server_that_is_away_for_long_blames_nobody_and_stops_no_worker(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        server = StubProcess("--slots", 8, "--log", on.engine_log)
        worker = remote_worker(on, server, rebuild_tries=1)
        on.submit(60)
        eventually(lambda: "waiting for a server" in worker.log_path.read_text(), 20, "waits")
        assert client_of(on.store).zcard(keys.LEASES) == 0
        with server:
            on.ready(worker)
            on.finish()
        eventually(lambda: on.announced(worker)["state"] == "degraded", 20, "degraded")
        on.submit(30, "b2")
        # A Redis clock that passes shows that it waits on, however long the server is away
        on.idle(worker, 3)
        assert client_of(on.store).hlen(keys.DEATHS) == 0
        with server:
            on.finish("b2")
            assert worker.stop() == 0
        on.settled()
        on.settled("b2")


def test_one_of_two_servers_dies_and_the_other_does_the_work(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        options = ("--slots", 8, "--latency-s", 0.1, "--log", on.engine_log)
        one, other = StubProcess(*options), StubProcess(*options)
        with one, other:
            worker = remote_worker(on, one, other, openai_concurrency=8)
            on.ready(worker)
            on.submit(200)
            on.running(60)
            one.kill()
            on.finish()
            assert "degraded" not in worker.log_path.read_text()
            assert client_of(on.store).hlen(keys.DEATHS) == 0
            assert worker.stop() == 0
            on.settled()


def test_a_worker_that_waits_for_a_server_stops_when_it_is_told(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        server = StubProcess("--log", on.engine_log)
        first = remote_worker(on, server)
        eventually(lambda: "waiting for a server" in first.log_path.read_text(), 20, "waits")
        assert first.stop(20) == 0
        second = remote_worker(on, server)
        with server:
            on.ready(second)
        eventually(lambda: on.announced(second)["state"] == "degraded", 20, "degraded")
        assert second.stop(20) == 0
