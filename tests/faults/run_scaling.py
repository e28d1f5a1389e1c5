"""A real queue whose workers come and go as KEDA's rule says; the course is kept.

    run_scaling.py [--save] [--going random|idlest] [--drain-s S]

A real gateway tells at /warmq/v1/scale what the queue holds. The rule of the chart's own
ScaledObject (tests/kit/chart/keda_rule.py) decides from it every 15 s of a clock that runs 30
times as fast as this machine's, and real worker processes with the simulated engine are started,
or get SIGTERM, whichever of them it hits. At the end every request has one answer. With --save
the course is kept in tests/faults/results/scaling.json; docs/evidence/kubernetes.md shows it.
`--going idlest` stops the worker that runs least, as a pod's deletion cost would have it, and
`--drain-s` gives a stop less time than its requests need: decision 0016 compares them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kit.chart.helm_chart import render, values  # noqa: E402
from kit.chart.keda_rule import EVERY_S, Scaler  # noqa: E402
from kit.gateways.gateway_process import GatewayProcess  # noqa: E402
from kit.protocol.lessee import chat, client_of, submit_batch  # noqa: E402
from kit.stacks.celery_side import simulated  # noqa: E402
from kit.verdicts.settled import assert_batch_settled, assert_nothing_left  # noqa: E402

from contract import naming  # noqa: E402
from contract.redis import keys  # noqa: E402
from contract.redis.batches import BatchStore  # noqa: E402
from demo.stack import RedisServer, Worker  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "scaling.json"
FASTER = 30
#: A worker runs 8 requests at once for 60 s each, as the clock of the rule counts.
SLOTS, LATENCY_S = 8, 60 / FASTER
#: Requests by when they come, in s of the rule's clock: a large batch, then some every 5 minutes
#: while it ends and after it, then a second large batch.
ARRIVALS = {60: 1500, **{3900 + 300 * n: 4 for n in range(8)}, 8100: 400}
AUTOSCALING = {"enabled": True, "maxReplicas": 4, "tokensPerReplica": 600}
#: The course has to end within so many s of the rule's clock.
LONGEST_S = 4 * 3600


def scaled_object() -> dict[str, Any]:
    """Return the spec of the ScaledObject that the chart makes."""
    worker = {"device": "cpu", "model": "/m", "autoscaling": AUTOSCALING}
    rendered = render(values(workers={"w": worker}, gateway={"store": "s3://files"}))
    (found,) = (each["spec"] for each in rendered if each["kind"] == "ScaledObject")
    return dict(found)


class Fleet:
    """Worker processes of one Redis: `to` are wanted, others drain.

    `held` has how many requests each held when it was told to go.
    """

    def __init__(self, store: BatchStore, url: str, folder: Path, settings: dict[str, Any]) -> None:
        self._store, self._url, self._folder = store, url, folder
        self._settings = settings | {"simulated_slots": SLOTS, "simulated_latency_s": LATENCY_S}
        self._chance = random.Random(7)
        self._wanted: list[Worker] = []
        self._all: list[Worker] = []
        self.held: list[int] = []

    def scale(self, to: int, going: str) -> None:
        """Start workers, or tell some to go: as Kubernetes does without a look at their work, or
        those that run least."""
        while len(self._wanted) < to:
            log = self._folder / f"worker-{len(self._all)}.log"
            worker = simulated(self._url, log, **self._settings).start()
            self._wanted.append(worker)
            self._all.append(worker)
        while len(self._wanted) > to:
            held = [self._held(worker) for worker in self._wanted]
            chosen = held.index(min(held)) if going == "idlest" else None
            at = self._chance.randrange(len(self._wanted)) if chosen is None else chosen
            self.held.append(held[at])
            told = self._wanted.pop(at)
            assert told.process is not None
            told.process.terminate()

    def _held(self, worker: Worker) -> int:
        """Return how many requests a worker has taken and not answered."""
        assert worker.process is not None
        ids = [str(one["id"]) for one in self._store.announcements()]
        (own,) = [one for one in ids if one.split(".")[-2] == str(worker.process.pid)] or [""]
        return client_of(self._store).hlen(keys.worker_key(own))

    def end(self) -> list[int]:
        """Stop all; return their exit codes."""
        return [worker.stop() for worker in self._all]


def load_of(gateway: GatewayProcess) -> dict[str, Any]:
    """Return what KEDA reads."""
    with urllib.request.urlopen(f"{gateway.url}/warmq/v1/scale", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def handed_back(store: BatchStore, batch_id: str, count: int) -> int:
    """Return how often workers put requests of a batch back into the queue."""
    ids = [naming.request_id(batch_id, f"c{n}") for n in range(1, count + 1)]
    return sum(client_of(store).llen(keys.attempts_key(request_id)) for request_id in ids)


def course(folder: Path, going: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run it to its end; return the course and what was found then."""
    spec, rows, sent = scaled_object(), [], dict[str, int]()
    rule = Scaler(spec)
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(folder / "redis"))
        store = BatchStore(stack.enter_context(server.client()), ttl_ms=3_600_000)
        gateway = stack.enter_context(GatewayProcess(server.url, folder))
        fleet = Fleet(store, server.url, folder, settings)
        began, at = time.monotonic(), 0.0
        while at < LONGEST_S:
            for due, count in ARRIVALS.items():
                if due <= at and f"b{due}" not in sent:
                    submit_batch(store, count, batch_id=f"b{due}")
                    sent[f"b{due}"] = count
            load = load_of(gateway)
            replicas = rule.decide(at, load["tokens"])
            told = (load[name] for name in ("tokens", "waiting", "in_flight", "workers"))
            rows.append([round(at), *told, replicas])
            fleet.scale(replicas, going)
            if len(sent) == len(ARRIVALS) and replicas == 0:
                break
            # The next decision: this is the clock of what is simulated here, it waits for nothing.
            at += EVERY_S
            time.sleep(max(0.0, began + at / FASTER - time.monotonic()))
        codes = fleet.end()
        back = sum(handed_back(store, name, count) for name, count in sent.items())
        for batch_id, count in sent.items():
            bodies = {f"c{n}": chat(f"question {n}") for n in range(1, count + 1)}
            assert_batch_settled(store, batch_id, bodies)
        assert_nothing_left(store)
        deaths = client_of(store).hlen(keys.DEATHS)
    assert set(codes) == {0}, codes
    assert deaths == 0
    return {
        "spec": spec,
        "columns": ["s", "tokens", "waiting", "in_flight", "workers", "replicas"],
        "rows": rows,
        "requests": sum(sent.values()),
        "workers_started": len(codes),
        "workers_told_to_go": len(fleet.held),
        "held_when_told": fleet.held,
        "handed_back": back,
    }


def main() -> None:
    """Run the course; print when the replicas changed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--save", action="store_true")
    options.add_argument("--going", choices=("random", "idlest"), default="random")
    options.add_argument("--drain-s", type=float, metavar="S")
    chosen = options.parse_args()
    settings = {} if chosen.drain_s is None else {"drain_timeout_s": chosen.drain_s}
    with tempfile.TemporaryDirectory() as folder:
        found = course(Path(folder), chosen.going, settings)
    for before, row in zip([None, *found["rows"]], found["rows"], strict=False):
        if before is None or before[-1] != row[-1]:
            print(row)
    assert found["rows"][-1][-1] == 0, "workers were left"
    print({name: told for name, told in found.items() if name not in ("spec", "columns", "rows")})
    if chosen.save:
        head = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "faster": FASTER}
        RESULTS.write_text(json.dumps(head | found) + "\n")


if __name__ == "__main__":
    main()
