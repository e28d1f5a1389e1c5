"""People's online requests beside a batch on the worker's own engine, on one GPU.

    online_beside.py --out FILE [--rounds 2] [--seconds 25] [--until 560]
                     [--rows alone,beside,batch] [--shape 8b | --model DIR --engine JSON]

alone   5 people a second at the gateway; nothing else is queued
beside  the same; a batch of 100,000 requests is queued
batch   the batch; nobody comes
fcfs    the same on a second engine, whose scheduler does not order by priority; nobody comes

Both engines share the GPU; only one works at a time. Each has a Redis of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

import aiohttp
import orjson
from bench.common import report
from bench.common.load import HELD, Held, hold, wait_ready
from bench.gpu import workload
from bench.gpu.pairs import ENGINE, GIB, ROOT, START_S, as_options
from bench.gpu.people import PROMPT, Felt, People, feelings
from bench.gpu.record import Record, accelerator, options
from bench.gpu.swaps import keep_logs
from kit.gateways.gateway_process import GatewayProcess

from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually

BATCH = 100_000
PEOPLE_PER_S = 5
#: Seconds until a batch fills the engine, and between two rows of one batch.
FILLS_S, BETWEEN_S = 12.0, 3.0
IDLE_S = 60.0
#: By name: the two rows whose figures are divided, and the bar of the ratio.
BARS = {
    "first p99, beside to alone": ("beside", "alone", 3.5),
    "batch tokens/s, beside to batch": ("beside", "batch", 0.9),
    "batch tokens/s, batch to fcfs": ("batch", "fcfs", 0.99),
}
POLICIES = ("priority", "fcfs")
ROWS = ("alone", "beside", "batch", "fcfs")


class OnlinePeople(People):
    """People at the gateway, whose stream shows the tokens only in its last chunk."""

    stream_options: ClassVar[dict[str, bool]] = {"include_usage": True}

    @staticmethod
    def note(one: Felt, event: dict[str, Any]) -> None:
        """Note when text came; the last chunk has the number of all tokens."""
        if event["choices"] and event["choices"][0].get("text"):
            one.came.append(time.monotonic())
            one.counts.append(0)
        elif usage := event.get("usage"):
            one.counts.append(usage["completion_tokens"])


class Side:
    """A Redis, a worker with an engine of its own, and a batch that is held back."""

    def __init__(self, stack: ExitStack, folder: Path, chosen: argparse.Namespace, policy: str):
        folder.mkdir()
        self.redis = stack.enter_context(RedisServer(folder / "redis", "--appendonly", "no"))
        self.client = stack.enter_context(self.redis.client())
        model = chosen.model or workload.write_model(folder / "model", chosen.shape)
        engine = ENGINE | {
            "max_num_batched_tokens": 2048, "max_num_seqs": 256,
            "kv_cache_memory_bytes": int(chosen.kv_gib * GIB), "scheduling_policy": policy,
        } | json.loads(chosen.engine)  # fmt: skip
        cache = os.environ.get("VLLM_CACHE_ROOT", str(folder / "cache"))
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.worker = stack.enter_context(
            Worker(
                self.redis.url, folder.parent / f"worker-{policy}.log", ROOT,
                {"PYTHONPATH": path, "VLLM_CACHE_ROOT": f"{cache}-{policy}"},
                model=model.resolve(), engine_args=as_options(engine),
            )
        )  # fmt: skip
        wanted = workload.requests(1000)
        self.held: Held = hold(
            self.client, policy, chosen.batch, lambda n: workload.body(wanted[n % len(wanted)])
        )
        self._store = BatchStore(self.client, ttl_ms=3_600_000)

    def tokens(self) -> int:
        """Return the tokens of the batch's answers so far."""
        return int(self.client.hget(keys.batch_key(self.held.batch.id), "completion_tokens") or 0)

    def hold_back(self) -> None:
        """Take from the worker what it has not leased; wait until it runs nothing."""
        self.client.rename(self.held.list_key, HELD)
        eventually(self._is_idle, IDLE_S, "no request is in flight", 0.2)

    def _is_idle(self) -> bool:
        return not any(worker.get("in_flight") for worker in self._store.announcements())

    def batch_per_s(self, seconds: float) -> float:
        """Return the batch's tokens a second, over so many seconds from now on."""
        began, before = time.monotonic(), self.tokens()
        time.sleep(seconds)
        return (self.tokens() - before) / (time.monotonic() - began)


class Field:
    """Both sides, and the gateway of the first one."""

    def __init__(self, sides: dict[str, Side], url: str, seconds: float) -> None:
        self._sides, self._url, self._seconds = sides, url, seconds
        self._ours = sides["priority"]
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            self._model: str = orjson.loads(answer.read())["data"][0]["id"]

    def measure(self, row: str, number: int) -> dict[str, Any]:
        """Measure one row; the rows of a round come in this order."""
        if row in ("alone", "beside"):
            return asyncio.run(self._with_people(row, number))
        side = self._sides["fcfs"] if row == "fcfs" else self._ours
        if row == "fcfs":
            side.held.release()
        time.sleep(FILLS_S if row == "fcfs" else BETWEEN_S)
        rate = side.batch_per_s(self._seconds)
        side.hold_back()
        return {"batch_tokens_per_s": round(rate, 1)}

    async def _with_people(self, row: str, number: int) -> dict[str, Any]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            people = OnlinePeople(session, self._url, self._model)
            people.come(PEOPLE_PER_S, number)
            if row == "beside":
                self._ours.held.release()
            await asyncio.sleep(FILLS_S if row == "beside" else BETWEEN_S)
            began = time.monotonic()
            rate = await asyncio.to_thread(self._ours.batch_per_s, self._seconds)
            felt = people.between(began, time.monotonic())
            await people.leave()
        found: dict[str, Any] = {"people": feelings(felt)}
        return found | ({"batch_tokens_per_s": round(rate, 1)} if row == "beside" else {})


@contextmanager
def started(chosen: argparse.Namespace) -> Iterator[Field]:
    """Start both sides and the gateway; send some requests of people, which are not counted."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmq-online-")))
        stack.callback(keep_logs, folder, chosen.out)
        policies = POLICIES if "fcfs" in chosen.rows else POLICIES[:1]
        sides = {name: Side(stack, folder / name, chosen, name) for name in policies}
        gateway = stack.enter_context(GatewayProcess(sides["priority"].redis.url, folder))
        for side in sides.values():
            wait_ready(side.client, START_S)
            side.held.release()  # the engine is warm after a full server's worth
            time.sleep(FILLS_S)
            side.hold_back()
        yield Field(sides, gateway.url, chosen.seconds)


def figure(row: dict[str, Any], bar: str) -> float:
    """Return what a bar compares of a row."""
    in_ms = bar.startswith("first")
    return float(row["people"]["first_ms"]["p99"] if in_ms else row["batch_tokens_per_s"])


def reached(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of each round whose rows are all there, over the rounds."""
    measured = {(row["round"], row["row"]): row for row in rows}
    found: dict[str, list[float]] = {}
    for bar, (dividend, divisor, _) in BARS.items():
        for number in range(rows[-1]["round"] + 1):
            pair = [measured.get((number, name)) for name in (dividend, divisor)]
            if pair[0] and pair[1]:
                found.setdefault(bar, []).append(figure(pair[0], bar) / figure(pair[1], bar))
    return {name: report.spread(values, 3) for name, values in found.items()}


def arguments() -> argparse.Namespace:
    """Return the chosen options."""
    parser = options(__doc__ or "", rounds=2, seconds=25, seconds_are="measured in each row")
    parser.add_argument("--until", type=float, default=1e9, help="begin no round that ends later")
    parser.add_argument("--rows", type=lambda rows: rows.split(","), default=ROWS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--model", type=Path, help="a model folder instead of --shape")
    parser.add_argument("--engine", default="{}", help="more engine arguments, as JSON")
    parser.add_argument("--kv-gib", type=float, default=16, help="KV cache of each engine")
    return parser.parse_args()


def main() -> None:
    """Measure; write what there is after every row."""
    chosen = arguments()
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    with started(chosen) as field:
        record = Record(
            chosen, begin, seconds=chosen.seconds, engine=chosen.engine, kv_gib=chosen.kv_gib,
            prompt=PROMPT, bars=BARS, rows=rows,
        )  # fmt: skip
        round_s = 2 * (FILLS_S + BETWEEN_S) + len(chosen.rows) * chosen.seconds + 15
        for number in range(chosen.rounds):
            if time.monotonic() - begin + round_s > chosen.until:
                print(f"no time for round {number}", flush=True)
                break
            for name in chosen.rows:
                row = {"row": name, "round": number} | field.measure(name, number)
                rows.append(row | {"ended_s": round(time.monotonic() - begin, 1)})
                record.keep(rows=rows, reached=reached(rows), accelerator=accelerator())
                short = {key: value for key, value in row.items() if key != "people"}
                shown = row.get("people", {})
                print(short, shown.get("first_ms"), shown.get("errors"), flush=True)
    print(reached(rows), flush=True)


if __name__ == "__main__":
    main()
