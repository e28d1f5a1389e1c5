"""Answers bound to a JSON schema, through the queue and by `LLM.generate`, on one GPU.

    structured.py --out FILE [--until 220] [--rounds 1] [--requests 1000 192]
                  [--shape 8b | --model DIR --engine JSON] [--max-num-seqs 256] [--kv-gib 18]

all     `LLM.generate` with StructuredOutputsParams, everything handed over at once
queue   from Redis, with `response_format`, through the real worker process

Schemas of 5 and of 50 fields, about 50 and 500 tokens an answer; one schema for all requests, and
100 different ones in turn; `mixed` ones differ in the order of their fields' types, too. No run has
a schema of another run. Both engines share the GPU, only one works at a time. Where --until would
not suffice, a row has fewer requests, or is left out. `mask_s` are the seconds in which vLLM
computed masks, `chunk` is how many neighbours it gives to a thread (masks.py): 16, and in the
worker's engine 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from bench.common import report
from bench.common.load import Held, hold
from bench.gpu import masks, schemas, workload
from bench.gpu.pairs import ENGINE, GIB, HERE, ROOT, RUN_S, Peer, as_options
from bench.gpu.record import Record, options
from bench.gpu.swaps import keep_logs

from contract.redis import keys
from demo.stack import RedisServer, procfile_command
from worker.engine.vllm.processes import NEIGHBOURS


class Kind(NamedTuple):
    """What the requests of a row have in common."""

    fields: int
    #: Different schemas.
    schemas: int
    mixed: bool = False
    #: Neighbours whose masks one thread computes in the worker's engine.
    chunk: int = NEIGHBOURS
    #: The same of `LLM.generate`'s engine.
    offline_chunk: int = masks.CHUNK

    @property
    def name(self) -> str:
        """The row's name among the figures."""
        parts = [f"fields{self.fields}", f"schemas{self.schemas}"]
        parts += ["mixed"] * self.mixed
        parts += [f"chunk{self.chunk}"] * (self.chunk != NEIGHBOURS)
        parts += [f"offline{self.offline_chunk}"] * (self.offline_chunk != masks.CHUNK)
        return "_".join([*parts, "queue_to_all"])


KINDS = (
    Kind(5, 1), Kind(5, 100), Kind(5, 100, mixed=True),
    Kind(50, 1), Kind(50, 100), Kind(50, 100, mixed=True),
    Kind(50, 100, chunk=2), Kind(50, 100, mixed=True, chunk=2),
    Kind(50, 100, chunk=masks.CHUNK), Kind(5, 100, chunk=masks.CHUNK),
)  # fmt: skip
#: The engine whose masks a form needs.
FORMS = {"queue": "worker", "all": "offline"}
#: Without spaces at will, which random weights would write without end.
GRAMMAR = {"backend": "xgrammar", "disable_any_whitespace": True}
#: Tokens a second, and seconds that the queue takes for each different schema, until measured.
RATE, SCHEMA_S = 4000.0, 0.03
#: The least share of the chosen requests that a row is begun with: with 128 and fewer requests vLLM
#: uses one thread.
LEAST = 0.8
BARS = {kind.name: 0.9 for kind in KINDS}
EXPECTED = {
    "written": "after three runs with 1, 2, 4 and 16 neighbours a thread",
    "fields5_schemas1_queue_to_all": 1.3,
    "fields5_schemas100_queue_to_all": 1.05,
    "fields5_schemas100_mixed_queue_to_all": 1.05,
    "fields50_schemas1_queue_to_all": 2.0,
    "fields50_schemas100_queue_to_all": 1.3,
    "fields50_schemas100_mixed_queue_to_all": 1.0,
    "fields50_schemas100_chunk2_queue_to_all": 1.2,
    "fields50_schemas100_mixed_chunk2_queue_to_all": 0.8,
    "fields50_schemas100_chunk16_queue_to_all": 0.7,
    "fields5_schemas100_chunk16_queue_to_all": 0.8,
    "why": "masks take 60 to 80 % of the time; a thread with 16 slow neighbours doubles that",
}


class Bench:
    """Both engines and Redis."""

    def __init__(
        self, server: RedisServer, worker: Peer, offline: Peer, computed: masks.Masks
    ) -> None:
        self._server, self._worker, self._offline = server, worker, offline
        self._masks = computed
        self._runs = 0

    def warm_up(self, count: int) -> None:
        """Run some requests in both; the process that compiles schemas starts meanwhile."""
        self._worker.wait_ready()
        held = self._held(Kind(5, 1), count)
        held.release()
        self._offline.wait_ready()
        print("warm:", self._all(Kind(5, 1), count), flush=True)
        self._ended(held, count)

    def time(self, form: str, kind: Kind, count: int) -> dict[str, Any]:
        """Run all requests one way; return tokens a second, and the seconds of vLLM's masks."""
        engine = FORMS[form]
        self._masks.set_chunk(engine, kind.chunk if form == "queue" else kind.offline_chunk)
        before = self._masks.read(engine)
        found = self._queue(kind, count) if form == "queue" else self._all(kind, count)
        masked = self._masks.read(engine)
        rates = {"tokens_per_s": round(found["tokens"] / found["seconds"], 1)}
        return rates | found | {
            name: round(masked[name] - before[name], 3) for name in ("mask_s", "mask_steps")
        }  # fmt: skip

    def _all(self, kind: Kind, count: int) -> dict[str, Any]:
        self._runs += 1
        return self._offline.ask(
            fields=kind.fields, schemas=kind.schemas, mixed=kind.mixed, count=count, run=self._runs
        )

    def _queue(self, kind: Kind, count: int) -> dict[str, Any]:
        held = self._held(kind, count)
        time.sleep(0.2)
        self._worker.ask(do="watch", count=count)
        began = held.release()
        found = self._ended(held, count)
        found["seconds"] = found.pop("ended") - began
        return found | self._worker.ask(do="watched")

    def _held(self, kind: Kind, count: int) -> Held:
        self._runs += 1
        made = schemas.schemas_of(kind.fields, kind.schemas, self._runs, kind.mixed)
        return hold(
            self._server.client(), f"structured{self._runs}", count,
            lambda n: schemas.body(n, kind.fields, made),
        )  # fmt: skip

    def _ended(self, held: Held, count: int) -> dict[str, Any]:
        ended = held.wait(RUN_S)
        batch = held.client.hgetall(keys.batch_key(held.batch.id))
        held.client.flushdb()
        held.client.close()
        failed = count - int(batch[b"completed"])
        if failed:
            print(batch, self._worker.tail(), flush=True)
        return {
            "ended": ended, "failed": failed, "prompt_tokens": int(batch[b"prompt_tokens"]),
            "tokens": int(batch[b"completion_tokens"]),
        }  # fmt: skip


@contextmanager
def started(chosen: argparse.Namespace) -> Iterator[Bench]:
    """Start Redis and both engines at once; compile caches apart, so that they do not meet."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmq-gpu-")))
        stack.callback(keep_logs, folder, chosen.out)
        server = stack.enter_context(RedisServer(folder))
        model = chosen.model or workload.write_model(folder / f"llama-{chosen.shape}", chosen.shape)
        model = str(model.resolve())
        engine = engine_of(chosen)
        plugin = masks.write_plugin(folder)
        computed = masks.Masks(folder)
        path = [str(ROOT / "tests"), str(ROOT), str(plugin), os.environ.get("PYTHONPATH", "")]
        env = {"PYTHONPATH": os.pathsep.join(path).rstrip(os.pathsep)}
        cache = os.environ.get("VLLM_CACHE_ROOT", str(folder / "cache"))
        grammar = shlex.quote(json.dumps(GRAMMAR))
        command = [*procfile_command(), "--include=bench.gpu.inside"]
        worker = Peer("worker", folder, command, env | computed.env("worker") | {
            "WARMQ_REDIS_URL": server.url, "WARMQ_MODEL": model, "VLLM_CACHE_ROOT": cache,
            "WARMQ_ENGINE_ARGS": f"{as_options(engine)} --structured-outputs-config {grammar}",
        })  # fmt: skip
        stack.callback(worker.stop)
        whole = engine | {
            "model": model, "disable_log_stats": True, "structured_outputs_config": GRAMMAR,
        }  # fmt: skip
        command = [sys.executable, str(HERE / "offline.py"), "ADDRESS"]
        env |= {"VLLM_CACHE_ROOT": f"{cache}-offline"} | computed.env("offline")
        offline = Peer("offline", folder, [*command, json.dumps(whole)], env)
        stack.callback(offline.stop)
        bench = Bench(server, worker, offline, computed)
        bench.warm_up(chosen.max_num_seqs)
        yield bench


def engine_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the engines' arguments but the grammar's."""
    given = {"kv_cache_memory_bytes": int(chosen.kv_gib * GIB)}
    return ENGINE | {"max_num_seqs": chosen.max_num_seqs} | given | json.loads(chosen.engine)


def reached(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each kind's ratios."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row["queue_to_all"])
    return {name: report.spread(values, 4) for name, values in found.items()}


def arguments() -> argparse.Namespace:
    """Return the chosen options."""
    parser = options(__doc__ or "", rounds=1)
    parser.add_argument("--until", type=float, default=1e9, help="seconds in which all rows end")
    parser.add_argument("--requests", type=int, nargs=2, default=(1000, 192), help="5, 50 fields")
    parser.add_argument("--model", type=Path, help="a model folder instead of --shape")
    parser.add_argument("--engine", default="{}", help="more engine arguments, as JSON")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-gib", type=float, default=18, help="KV cache of each engine")
    return parser.parse_args()


def main() -> None:
    """Measure; write what there is after every row."""
    chosen = arguments()
    begin = time.monotonic()
    left, rows = list(KINDS) * chosen.rounds, list[dict[str, Any]]()
    most, rate, schema_s = dict(zip((5, 50), chosen.requests, strict=True)), RATE, SCHEMA_S
    with started(chosen) as bench:
        record = Record(
            chosen, begin, engine=engine_of(chosen), grammar=GRAMMAR, most_tokens=schemas.MOST,
            bars=BARS, expected=EXPECTED, rows=rows,
        )  # fmt: skip
        while left:
            tokens = len(FORMS) * schemas.TOKENS_A_FIELD
            tokens *= sum(most[kind.fields] * kind.fields for kind in left)
            remaining = chosen.until - (time.monotonic() - begin)
            remaining -= schema_s * sum(kind.schemas for kind in left)
            kind = left.pop(0)
            share = min(1.0, rate * remaining / tokens)
            if share < LEAST:
                print(f"no time for {kind}", flush=True)
                continue
            row: dict[str, Any] = {"name": kind.name} | kind._asdict()
            row["requests"] = int(most[kind.fields] * share)
            for form in report.in_turn(tuple(FORMS), len(rows)):
                row[form] = bench.time(form, kind, row["requests"])
            ours, alone = (row[form] for form in FORMS)
            rate = alone["tokens_per_s"]
            schema_s = max(schema_s, (ours["seconds"] - alone["seconds"]) / 100)
            row["queue_to_all"] = round(ours["tokens_per_s"] / alone["tokens_per_s"], 4)
            rows.append(row | {"ended_s": round(time.monotonic() - begin, 1)})
            record.keep(rows=rows, reached=reached(rows))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(reached(rows)))


if __name__ == "__main__":
    main()
