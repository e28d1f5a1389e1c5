"""A run in which everything happens that metrics tell of, for tests of pages and of Prometheus."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from kit.chart.metric_pages import series_of
from kit.gateways.gateway_process import GatewayProcess
from kit.protocol.lessee import QUEUE, Lessee, chat, client_of, submit_batch
from kit.stacks.celery_side import simulated
from prometheus_client.parser import text_string_to_metric_families

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually, free_port

#: The queue that the two workers serve; QUEUE is served by nobody.
SERVED = f"{QUEUE}.m"


def totals(url: str) -> Counter[str]:
    """Return the sum of the samples of each series of a page; nothing while it does not answer."""
    found = Counter[str]()
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return found
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_sum")):
                found[series_of(sample.name)] += sample.value
    return found


@dataclass
class Run:
    """Its processes, and the pages that they serve."""

    redis: RedisServer
    store: BatchStore
    gateway: GatewayProcess
    workers: list[Worker]
    pages: list[str]

    def workers_total(self) -> Counter[str]:
        """Return the sum of the two workers' pages."""
        return sum((totals(page) for page in self.pages), Counter[str]())

    def reach(self, what: str, *, gateway: bool = False, above: float = 0) -> None:
        """Wait until a series is above a number."""
        look = (lambda: totals(self.gateway.url)) if gateway else self.workers_total
        eventually(lambda: look()[what] > above, 90, f"{what} > {above}", 0.5)


def everything(run: Run) -> None:
    """Let all of it happen; in the end some requests wait, and nothing runs."""
    for happens in (_lose_leases, _end_each_way, _lose_redis, _leave_some):
        happens(run)


@contextmanager
def eventful(folder: Path) -> Iterator[Run]:
    """Start two workers, a gateway and their Redis, for `everything` to happen to them."""
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        client = stack.enter_context(redis.client())
        client.config_set("maxmemory", "500mb")
        workers = [
            stack.enter_context(
                simulated(
                    redis.url, folder / f"worker-{port}.log", metrics_port=port,
                    served_model_name="m", lease_s=2, drain_timeout_s=2, look_ahead=0,
                    simulated_slots=2, simulated_latency_s=0.05,
                )
            )
            for port in ports
        ]  # fmt: skip
        gateway = stack.enter_context(GatewayProcess(redis.url, folder))
        pages = [f"http://127.0.0.1:{port}" for port in ports]
        run = Run(redis, BatchStore(client, ttl_ms=600_000), gateway, workers, pages)
        run.reach("warmq_engine_starts_total", above=1)
        run.reach("warmq_redis_up", gateway=True)
        yield run


def _lose_leases(run: Run) -> None:
    """Both workers stand still with all slots full; one goes on and has the other's requests."""
    slow = [chat(f"{n}") | {"user": "simulate:sleep=600"} for n in range(4)]
    batch = submit_batch(run.store, bodies=slow, batch_id="slow", queue=SERVED).batch
    run.reach("warmq_slots_in_use", above=3)
    for worker in run.workers:
        os.kill(worker.pid, signal.SIGSTOP)
    run.reach("warmq_lease_overdue_seconds", gateway=True)
    os.kill(run.workers[0].pid, signal.SIGCONT)
    eventually(lambda: totals(run.pages[0])["warmq_leases_swept_total"] > 0, 60, "swept", 0.5)
    os.kill(run.workers[1].pid, signal.SIGCONT)
    run.reach("warmq_leases_lost_total")
    run.reach("warmq_redeliveries_total")
    run.reach("warmq_leases", gateway=True)
    run.store.cancel(batch)


def _end_each_way(run: Run) -> None:
    """Requests are answered, fail, and kill their engines until they are dead letters."""
    for n in range(4):
        submit_batch(run.store, 25, batch_id=f"b{n}", tenant=f"t{n}", queue=SERVED)
    submit_batch(run.store, bodies=[{"no": 1}], batch_id="bad", queue=SERVED)
    submit_batch(run.store, bodies=[chat("x") | {"user": "simulate:die"}], batch_id="poison",
                 queue=SERVED)  # fmt: skip
    run.reach("warmq_engine_deaths_total", above=1)
    run.reach("warmq_dead_letters", gateway=True)
    run.reach("warmq_requests_total", above=104)
    assert _online(run) == 200
    client = client_of(run.store)
    client.config_set("min-replicas-to-write", 1)  # Redis refuses all writes
    assert _online(run) == 503
    client.config_set("min-replicas-to-write", 0)


def _online(run: Run) -> int:
    """Ask for a chat; return the answer's status."""
    body = {"model": "m"} | chat("hello")
    return httpx.post(f"{run.gateway.url}/v1/chat/completions", json=body, timeout=60).status_code


def _lose_redis(run: Run) -> None:
    run.redis.stop(signal.SIGKILL)
    run.reach("warmq_redis_outages_total", above=1)
    run.redis.start("--maxmemory", "500mb")
    client_of(run.store).ping()


def _leave_some(run: Run) -> None:
    """In a queue that nobody serves: one that its engine died with twice, and some that wait."""
    submit_batch(run.store, 3, batch_id="left", tenant="t9")
    lessee = Lessee(client_of(run.store))
    for _ in range(2):
        (lease,) = lessee.pop(1)
        lessee.release(lease, died=[lease])
