"""People and a batch at one `vllm serve` on one GPU: what people feel, what the batch gets.

    beside_people.py --out FILE [--rows people,today,alone,...] [--rounds 2] [--seconds 60]
                     [--until 545] [--shape 8b | --model DIR --engine JSON]

people       5 people a second and a batch; the worker gives way; the server orders by priority
today        the same server; the worker uses all that the server can do
alone        the same server; no worker
no-policy    as `people`, at a server that does not order by priority
night        nobody but the worker that gives way; then 20 people a second come at once
night-today  nobody but the worker that uses all
alone-20     20 people a second; no worker

The two servers have the same arguments otherwise, and share the GPU; only one works at a time.
Rows that an earlier run with the same --out has measured are kept and not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

import aiohttp
from bench.common import report
from bench.common.load import Held, hold, is_ready
from bench.common.process import Process, well
from bench.gpu import workload
from bench.gpu.instead import TEMPLATE
from bench.gpu.pairs import ENGINE, GIB, ROOT, START_S, as_options
from bench.gpu.people import (
    LOOK_S,
    Look,
    People,
    Watch,
    feelings,
    figures,
    pooled,
    reached,
    read,
    returned,
    show,
)  # fmt: skip
from bench.gpu.record import Record, accelerator, options
from bench.gpu.swaps import keep_logs

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually, free_port

MODEL = "llama"
#: Seconds of a row beside its settling and measured time: the worker's start, the last answers.
OVERHEAD_S = 8.0
IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """What a row consists of; `shared_with`: the worker's setting, None without a worker."""

    server: str
    people_per_s: float
    shared_with: str | None
    settle_s: float
    #: Part of --seconds that is measured; whether people come at once after that.
    part: float = 1.0
    returns: bool = False


ROWS = {
    "people": Row("priority", 5, "people", 30),
    "today": Row("priority", 5, "nobody", 10),
    "alone": Row("priority", 5, None, 3),
    "no-policy": Row("fcfs", 5, "people", 30),
    "night": Row("priority", 0, "people", 45, 0.5, returns=True),
    "night-today": Row("priority", 0, "nobody", 10, 0.5),
    "alone-20": Row("priority", 20, None, 3, 0.5),
}
#: These take turns in each round; the others follow, so that the worker has met people before.
IN_TURN = ("people", "today", "alone", "no-policy")
RETURNING_PER_S = 20.0


class Server(Process):
    """`vllm serve` with one scheduling policy, by its module."""

    def __init__(self, folder: Path, policy: str, model: Path, engine: dict[str, Any]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        cache = os.environ.get("VLLM_CACHE_ROOT", str(folder / "cache"))
        super().__init__(
            folder / f"server-{policy}.log",
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
             "--served-model-name", MODEL, "--port", str(port), "--disable-uvicorn-access-log",
             *shlex.split(as_options(engine | {"scheduling_policy": policy}))],
            VLLM_CACHE_ROOT=f"{cache}-{policy}",
        )  # fmt: skip

    def is_well(self) -> bool:
        """Whether it answers; raises if it has ended."""
        self.check()
        return well(self.url)

    def is_idle(self) -> bool:
        """Whether no request is in it."""
        self.check()
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            values = read(answer.read())
        return not values["num_requests_running"] + values["num_requests_waiting"]


class Field:
    """All that runs, and the batch's requests."""

    def __init__(
        self, chosen: argparse.Namespace, folder: Path, redis: RedisServer,
        servers: Mapping[str, Server],
    ) -> None:  # fmt: skip
        self.chosen, self.folder, self.redis, self.servers = chosen, folder, redis, servers
        self.store = BatchStore(redis.client(), ttl_ms=3_600_000)
        self.wanted = workload.requests(chosen.requests)
        self.runs = 0

    def warm(self) -> None:
        """Run a full server's worth of requests on each server; they are not counted."""
        for server in self.servers.values():
            asyncio.run(self._warm(server))

    async def _warm(self, server: Server) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            people = People(session, server.url, MODEL)
            people.come(self.chosen.load * RETURNING_PER_S, 0)

            async def ask(request: tuple[str, int]) -> None:
                body = workload.body(request) | {"model": MODEL, "priority": 0}
                async with session.post(f"{server.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()

            await asyncio.gather(*map(ask, self.wanted[: self.chosen.warm_requests]))
            await people.leave()
        errors = [one.error for one in people.felt if not one.answered]
        assert len(errors) < len(people.felt), errors[:3]

    def measure(self, name: str, number: int) -> dict[str, Any]:
        """Measure one row."""
        row = ROWS[name]
        self.runs += 1
        server = self.servers[row.server]
        worker, held = None, None
        if row.shared_with is not None:
            held = hold(
                self.redis.client(), f"people{self.runs}", len(self.wanted),
                lambda n: workload.body(self.wanted[n - 1]),
            )  # fmt: skip
            worker = self._worker(server, row.shared_with)
        try:
            return {"row": name, "round": number} | asyncio.run(
                self._measure(row, number, server, worker, held)
            )
        finally:
            if worker is not None:
                worker.kill()
            self._forget()
            eventually(server.is_idle, IDLE_S, f"no request in the server after {name}", 0.2)

    def _worker(self, server: Server, shared_with: str) -> Worker:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        chosen = self.chosen
        targets = {"openai_ttft_ms": chosen.ttft_ms, "openai_itl_ms": chosen.itl_ms}
        return Worker(
            self.redis.url, self.folder / f"worker-{shared_with}.log", ROOT, {"PYTHONPATH": path},
            engine="openai", openai_base_urls=f"{server.url}/v1", openai_shared_with=shared_with,
            **{name: value for name, value in targets.items() if value is not None},
        )  # fmt: skip

    def _forget(self) -> None:
        """Delete all but what a worker has learned of a server, which a worker keeps for days."""
        with self.redis.client() as client:
            gone = [key for key in client.scan_iter(count=5000) if not key.endswith(b":kept")]
            for begin in range(0, len(gone), 5000):
                client.unlink(*gone[begin : begin + 5000])

    async def _measure(
        self, row: Row, number: int, server: Server, worker: Worker | None, held: Held | None
    ) -> dict[str, Any]:
        began = time.monotonic()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            people = People(session, server.url, MODEL)
            watch = Watch(session, server.url, self.store.announcements)
            watching = asyncio.create_task(watch.run())
            if row.people_per_s:
                people.come(self.chosen.load * row.people_per_s, number)
            if worker is not None and held is not None:
                worker.start()
                held.release()
                await asyncio.to_thread(
                    eventually, lambda: is_ready(self.redis.client()), 90, "a worker", 0.2
                )
            await asyncio.sleep(self.chosen.settle * row.settle_s)
            before, after = await self._window(watch, row.part * self.chosen.seconds)
            back = await self._return(people, watch) if row.returns else None
            await people.leave()
            watching.cancel()
        found = self._found(people, watch, (before, after), held) | {
            "starts_s": round(before.at - began, 1), "limits": watch.over_time(before.at),
        }  # fmt: skip
        if back is not None:
            found["return"] = returned(people.between(back.at, after_all(people)), back)
        if worker is not None and worker.process is not None and worker.process.poll() is not None:
            raise RuntimeError(worker.log_path.read_text(errors="replace")[-4000:])
        return found

    async def _window(self, watch: Watch, seconds: float) -> tuple[Look, Look]:
        before = await watch.look()
        await asyncio.sleep(seconds)
        return before, await watch.look()

    async def _return(self, people: People, watch: Watch) -> Look:
        """Let people come all at once, for the seconds of such a row; return the look before."""
        before = await watch.look()
        people.come(self.chosen.load * RETURNING_PER_S, self.runs)
        await asyncio.sleep(ROWS["night"].part * self.chosen.seconds)
        return before

    def _found(
        self, people: People, watch: Watch, looks: tuple[Look, Look], held: Held | None
    ) -> dict[str, Any]:
        before, after = looks
        seconds = after.at - before.at
        written = after.tokens - before.tokens - people.tokens(before.at, after.at)
        within = [look for look in watch.looks if before.at <= look.at <= after.at]
        found: dict[str, Any] = {
            "seconds": round(seconds, 2),
            "people": feelings(people.between(before.at, after.at)),
            "batch_tokens_per_s": round(written / seconds, 1),
            "running": report.spread([look.running for look in within], 1)["median"],
            "targets_ms": {
                name: after.shared.get(f"{name}_ms_target") for name in ("ttft", "itl")
            } if after.shared else None,
        }  # fmt: skip
        if held is not None:
            with self.redis.client() as client:
                found["requests_left"] = client.llen(held.list_key)
            done = [look.worker.get("done", {}).get("completed", 0) for look in (before, after)]
            found["batch_requests"] = done[1] - done[0]
        return found


def after_all(people: People) -> float:
    """Return a time after the last request was sent."""
    return max((one.sent for one in people.felt), default=0.0) + 1.0


def order_of(rows: Sequence[str], number: int) -> list[str]:
    """Return a round's rows in their order."""
    first = [row for row in rows if row in IN_TURN]
    last = [row for row in rows if row not in IN_TURN]
    return [*(report.in_turn(first, number) if first else ()), *last]


def lasts_s(name: str, chosen: argparse.Namespace) -> float:
    """Return the seconds that a row needs."""
    row = ROWS[name]
    windows = row.part * (2 if row.returns else 1)
    return OVERHEAD_S + chosen.settle * row.settle_s + windows * chosen.seconds + LOOK_S


# -- the run ------------------------------------------------------------------------------


def model_of(folder: Path, shape: str) -> Path:
    """Write a model of a shape, with a template for the worker's chats, its probes."""
    model = workload.write_model(folder, shape)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@contextmanager
def started(chosen: argparse.Namespace, rows: Sequence[str]) -> Iterator[Field]:
    """Start Redis and the servers that the rows need at once; their compile caches are apart."""
    engine = ENGINE | {
        "max_num_batched_tokens": 2048, "max_num_seqs": 256,
        "kv_cache_memory_bytes": int(chosen.kv_gib * GIB),
    } | json.loads(chosen.engine)  # fmt: skip
    servers: dict[str, Server] = {}
    with tempfile.TemporaryDirectory(prefix="warmq-people-") as name:
        folder = Path(name)
        model = chosen.model or model_of(folder / f"llama-{chosen.shape}", chosen.shape)
        with RedisServer(folder / "redis", "--appendonly", "no") as redis:
            try:
                for policy in dict.fromkeys(ROWS[row].server for row in rows):
                    servers[policy] = Server(folder, policy, model.resolve(), engine)
                for policy, server in servers.items():
                    eventually(server.is_well, START_S, f"the server with {policy}", 0.5)
                yield Field(chosen, folder, redis, servers)
            finally:
                for server in servers.values():
                    server.stop()
                keep_logs(folder, chosen.out)


def arguments() -> argparse.Namespace:
    """Return the chosen options."""
    parser = options(__doc__ or "", rounds=2, seconds=60, seconds_are="measured in each row")
    parser.add_argument("--rows", default=",".join(ROWS), help="in the order of their importance")
    parser.add_argument("--until", type=float, default=1e9, help="begin no row that ends later")
    parser.add_argument("--settle", type=float, default=1.0, help="factor of the settling times")
    parser.add_argument("--load", type=float, default=1.0, help="factor of people's rates")
    parser.add_argument("--requests", type=int, default=8000, help="of the batch, for each row")
    parser.add_argument("--warm-requests", type=int, default=300)
    parser.add_argument("--model", type=Path, help="a model folder instead of --shape")
    parser.add_argument("--engine", default="{}", help="more engine arguments, as JSON")
    parser.add_argument("--kv-gib", type=float, default=16, help="KV cache of each server")
    parser.add_argument("--ttft-ms", type=float, help="the worker's target; default: its own")
    parser.add_argument("--itl-ms", type=float, help="the worker's target; default: its own")
    chosen = parser.parse_args()
    if unknown := set(chosen.rows.split(",")) - set(ROWS):
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    return chosen


def main() -> None:
    """Measure; write what there is after every row."""
    chosen = arguments()
    begin, names = time.monotonic(), chosen.rows.split(",")
    rows: list[dict[str, Any]] = []
    if chosen.out.exists():
        rows = [row for row in json.loads(chosen.out.read_text())["rows"] if "error" not in row]
    have = {(row["row"], row["round"]) for row in rows}
    todo = [(name, number) for number in range(chosen.rounds) for name in order_of(names, number)
            if (name, number) not in have]  # fmt: skip
    with started(chosen, [name for name, _ in todo]) as field:
        record = Record(
            chosen, begin, seconds=chosen.seconds, settle=chosen.settle, load=chosen.load,
            engine=chosen.engine, kv_gib=chosen.kv_gib, rows=rows,
        )  # fmt: skip
        field.warm()
        print(f"warm after {time.monotonic() - begin:.0f} s", flush=True)
        for name, number in todo:
            if time.monotonic() - begin + lasts_s(name, chosen) > chosen.until:
                print(f"no time for {name}", flush=True)
                continue
            try:
                row = field.measure(name, number)
            except (
                RuntimeError,
                TimeoutError,
                OSError,
                aiohttp.ClientError,
                AssertionError,
            ) as error:
                row = {"row": name, "round": number, "error": repr(error)[-4000:]}
            row["ended_s"] = round(time.monotonic() - begin, 1)
            rows.append(row | {"accelerator": accelerator()})
            record.keep(rows=rows, reached=reached(rows), pooled_first_ms=pooled(rows))
            print(json.dumps(row if "error" in row else {
                "row": name, "round": number, "ended_s": row["ended_s"], **figures(row),
            }), flush=True)  # fmt: skip
    show(rows)


if __name__ == "__main__":
    main()
