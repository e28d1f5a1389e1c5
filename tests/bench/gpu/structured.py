"""Answers bound to a JSON schema, through the queue and by `LLM.generate`, on one GPU.

    structured.py --out FILE [--until 220] [--rounds 1] [--requests 1500 256]
                  [--shape 8b | --model DIR --engine JSON] [--max-num-seqs 256] [--kv-gib 18]

all     `LLM.generate` with StructuredOutputsParams, everything handed over at once
queue   from Redis, with `response_format`, through the real worker process

Schemas of 5 and of 50 fields, about 50 and 500 tokens an answer; one schema for all requests, and
100 different ones in turn. No run has a schema of another run. Both engines share the GPU, only
one works at a time. Where --until would not suffice, a row has fewer requests, or is left out.
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
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from bench.common import report
from bench.common.load import Held, hold
from bench.gpu import schemas, workload
from bench.gpu.pairs import ENGINE, GIB, HERE, ROOT, RUN_S, Peer, as_options
from bench.gpu.record import Record, options
from bench.gpu.swaps import keep_logs

from contract.redis import keys
from demo.stack import RedisServer, procfile_command

#: (fields of a schema, different schemas)
KINDS = ((5, 1), (5, 100), (50, 1), (50, 100))
FORMS = ("queue", "all")
#: Without spaces at will, which random weights would write without end.
GRAMMAR = {"backend": "xgrammar", "disable_any_whitespace": True}
#: Tokens a second, and seconds that the queue takes for each different schema, until measured.
RATE, SCHEMA_S = 7000.0, 0.1
#: The least share of the chosen requests that a row is begun with.
LEAST = 0.2
BARS = {f"fields{fields}_schemas{schemas}_queue_to_all": 0.9 for fields, schemas in KINDS}
EXPECTED = {
    "written": "before the first run",
    "fields5_schemas1_queue_to_all": 0.97,
    "fields5_schemas100_queue_to_all": 0.6,
    "fields50_schemas1_queue_to_all": 0.98,
    "fields50_schemas100_queue_to_all": 0.65,
    "why": "each different schema is compiled in a process of its own first, one after another, "
    "0.1 s each; a run is so short that this is a large part of it",
}


class Bench:
    """Both engines and Redis."""

    def __init__(self, server: RedisServer, worker: Peer, offline: Peer) -> None:
        self._server, self._worker, self._offline = server, worker, offline
        self._runs = 0

    def warm_up(self, count: int) -> None:
        """Run some requests in both; the process that compiles schemas starts meanwhile."""
        self._worker.wait_ready()
        held = self._held(5, 1, count)
        held.release()
        self._offline.wait_ready()
        print("warm:", self.time("all", 5, 1, count), flush=True)
        self._ended(held, count)

    def time(self, form: str, fields: int, number: int, count: int) -> dict[str, Any]:
        """Run all requests one way; return tokens a second."""
        if form == "queue":
            found = self._queue(fields, number, count)
        else:
            self._runs += 1
            found = self._offline.ask(fields=fields, schemas=number, count=count, run=self._runs)
        return {"tokens_per_s": round(found["tokens"] / found["seconds"], 1)} | found

    def _queue(self, fields: int, number: int, count: int) -> dict[str, Any]:
        held = self._held(fields, number, count)
        time.sleep(0.2)
        self._worker.ask(do="watch", count=count)
        began = held.release()
        found = self._ended(held, count)
        found["seconds"] = found.pop("ended") - began
        return found | self._worker.ask(do="watched")

    def _held(self, fields: int, number: int, count: int) -> Held:
        self._runs += 1
        made = schemas.schemas_of(fields, number, self._runs)
        return hold(
            self._server.client(), f"structured{self._runs}", count,
            lambda n: schemas.body(n, fields, made),
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
        path = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = {"PYTHONPATH": os.pathsep.join(path).rstrip(os.pathsep)}
        cache = os.environ.get("VLLM_CACHE_ROOT", str(folder / "cache"))
        grammar = shlex.quote(json.dumps(GRAMMAR))
        worker = Peer("worker", folder, [*procfile_command(), "--include=bench.gpu.inside"], env | {
            "WARMQ_REDIS_URL": server.url, "WARMQ_MODEL": model, "VLLM_CACHE_ROOT": cache,
            "WARMQ_ENGINE_ARGS": f"{as_options(engine)} --structured-outputs-config {grammar}",
        })  # fmt: skip
        stack.callback(worker.stop)
        whole = engine | {
            "model": model, "disable_log_stats": True, "structured_outputs_config": GRAMMAR,
        }  # fmt: skip
        command = [sys.executable, str(HERE / "offline.py"), "ADDRESS"]
        offline = Peer("offline", folder, [*command, json.dumps(whole)], env | {
            "VLLM_CACHE_ROOT": f"{cache}-offline",
        })  # fmt: skip
        stack.callback(offline.stop)
        bench = Bench(server, worker, offline)
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
        name = f"fields{row['fields']}_schemas{row['schemas']}_queue_to_all"
        found.setdefault(name, []).append(row["queue_to_all"])
    return {name: report.spread(values, 4) for name, values in found.items()}


def arguments() -> argparse.Namespace:
    """Return the chosen options."""
    parser = options(__doc__ or "", rounds=1)
    parser.add_argument("--until", type=float, default=1e9, help="seconds in which all rows end")
    parser.add_argument("--requests", type=int, nargs=2, default=(1500, 256), help="5, 50 fields")
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
            tokens = len(FORMS) * schemas.TOKENS_A_FIELD * sum(most[one] * one for one, _ in left)
            remaining = chosen.until - (time.monotonic() - begin)
            remaining -= schema_s * sum(number for _, number in left)
            fields, number = left.pop(0)
            share = min(1.0, rate * remaining / tokens)
            if share < LEAST:
                print(f"no time for {fields} fields, {number} schemas", flush=True)
                continue
            row: dict[str, Any] = {"fields": fields, "schemas": number}
            row["requests"] = int(most[fields] * share)
            for form in report.in_turn(FORMS, len(rows)):
                row[form] = bench.time(form, fields, number, row["requests"])
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
