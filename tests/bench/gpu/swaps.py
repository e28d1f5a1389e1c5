"""One worker with several models against `LLM.generate` with each model already loaded.

    swaps.py --shape 8b --out FILE [--rounds 3] [--models 3] [--requests 1500] [--batches 15]
             [--output-tokens 16 256] [--prompt-tokens 64 512] [--max-num-seqs 256]

The models have the same shape and random weights. `offline` runs the requests of each model in one
call after another, on one loaded engine, which then ends. The worker gets as many requests for
each model, in batches that are submitted in turn (`--batches` for each model). Its first round
loads each model once and is not counted. A swap's seconds: from the last answer of one model to
the first answer of the next one, whose own time in the engine is taken off.

It ends at once, with the end of the worker's log, if the worker has ended or can load no model. The
logs of worker and vLLM stay next to --out. Random weights have no files, so the worker plans no
memory of the machine for those that sleep; the record has what they take.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from bench.common import report
from bench.gpu import workload
from bench.gpu.pairs import ENGINE, GIB, HERE, ROOT, START_S, Peer, as_options
from bench.gpu.record import Record, options

from contract.redis.announced_models import models_of, unloadable
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually
from producer import Batch, Client
from worker.machine.devices import machine

#: Actions of the worker's log that are told at the end.
TOLD = re.compile(r"swap|sleep|residence|model_load|GiB")
#: The beginning of the keys of answers: Celery's.
RESULT_KEY = "celery-task-meta-"
Wanted = Sequence[tuple[str, int]]
#: Most seconds until an engine that has ended has freed the GPU, and the MiB that may differ.
FREE_S, SPARE_MIB = 120.0, 1024
#: Seconds between two checks whether the worker still runs.
CHECK_EVERY_S = 5.0


def offline(folder: Path, engine: dict[str, Any], wanted: Wanted, runs: int) -> list[float]:
    """Return the seconds of some calls of `LLM.generate`, after one that warms up."""
    cache = os.environ.get("VLLM_CACHE_ROOT", str(folder / "cache")) + "-offline"
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "offline.py"), "ADDRESS", json.dumps(engine)]
    peer = Peer("offline", folder, command, {"PYTHONPATH": path, "VLLM_CACHE_ROOT": cache})
    (folder / "wanted.json").write_text(json.dumps(wanted))
    try:
        peer.wait_ready()
        found = [
            float(peer.ask(file=str(folder / "wanted.json"))["seconds"]) for _ in range(runs + 1)
        ]
    finally:
        peer.stop()
    return found[1:]


def wait_for_free_memory(before_mib: int) -> None:
    """Wait until the GPU has what it had free before an engine that has ended."""
    free = before_mib + SPARE_MIB
    eventually(
        lambda: memory_mib() <= free, FREE_S, f"at most {free} MiB of the GPU in use", every_s=0.5
    )


def why_it_ends(status: int | None, announced: Sequence[Mapping[str, Any]], log: str) -> str:
    """Return why a worker runs nothing more, with the end of its log; '' while it may."""
    if status is not None:
        return f"the worker has ended with status {status}:\n{log[-5000:]}"
    for worker in announced:
        failed, models = unloadable(worker), models_of(worker)
        if models and failed.keys() >= models.keys():
            reasons = "; ".join(f"{name}: {one.why}" for name, one in failed.items())
            return f"no model can be loaded: {reasons}\n{log[-5000:]}"
    return ""


class Watched:
    """A worker whose end, and whose failure to load any model, is an error at once."""

    def __init__(self, worker: Worker, store: BatchStore) -> None:
        self._worker, self._store = worker, store

    def check(self) -> None:
        """Raise RuntimeError if the worker runs nothing more."""
        process = self._worker.process
        status = process.poll() if process else None
        log = self._worker.log_path.read_text(errors="replace")
        if why := why_it_ends(status, self._store.announcements(), log):
            raise RuntimeError(why)

    def is_ready(self) -> bool:
        """Return whether a model is loaded."""
        self.check()
        return any(one.get("state") == "ready" for one in self._store.announcements())

    def wait_for(self, batch: Batch) -> None:
        """Wait for the end of a batch."""
        while True:
            self.check()
            with suppress(TimeoutError):
                batch.wait(CHECK_EVERY_S)
                return


def keep_logs(folder: Path, out: Path) -> None:
    """Copy the logs of worker and vLLM next to the record."""
    for log in sorted(folder.glob("*.log")):
        shutil.copy(log, out.with_suffix(f".{log.stem}.log"))


def memory_mib() -> int:
    """Return the GPU's memory in use."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError):
        return int(
            subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()[0]
        )
    return 0


def through_the_queue(
    server: RedisServer, client: Client, watched: Watched, names: Sequence[str], wanted: Wanted,
    batches: int,
) -> tuple[float, list[float]]:  # fmt: skip
    """Run the requests for each model; return the seconds, and those of each swap."""
    size = -(-len(wanted) // batches)
    began = datetime.now(UTC)
    sent = {
        client.submit(map(workload.body, wanted[at : at + size]), model=name): name
        for at in range(0, len(wanted), size)
        for name in names
    }
    for batch in sent:
        watched.wait_for(batch)
    ends = ends_of(server, {batch.id: name for batch, name in sent.items()})
    assert len(ends) == len(names) * len(wanted), len(ends)
    swaps = [
        (after - before).total_seconds() - in_engine_s
        for (before, _, one), (after, in_engine_s, other) in pairwise(ends)
        if one != other
    ]
    return (ends[-1][0] - began).total_seconds(), swaps


def ends_of(server: RedisServer, batches: dict[str, str]) -> list[tuple[datetime, float, str]]:
    """Return the answers of batches by their end: end, seconds in the engine, and model."""
    with server.client() as redis:
        metas = map(json.loads, redis.mget(list(redis.scan_iter(f"{RESULT_KEY}*", 5000))))
        return sorted(
            (datetime.fromisoformat(meta["date_done"]), meta["warmq"]["timing"]["engine_s"],
             batches[meta["warmq"]["batch"]])
            for meta in metas if meta["warmq"]["batch"] in batches
        )  # fmt: skip


def main() -> None:
    """Measure; write what there is after every round."""
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1500, help="for each model")
    parser.add_argument("--batches", type=int, default=15, help="for each model")
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(16, 256))
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(64, 512))
    parser.add_argument("--max-num-seqs", type=int, default=256)
    chosen = parser.parse_args()
    begin = time.monotonic()
    wanted = workload.requests(chosen.requests, chosen.output_tokens, chosen.prompt_tokens)
    engine = ENGINE | {"max_num_seqs": chosen.max_num_seqs, "gpu_memory_utilization": 0.8}
    with tempfile.TemporaryDirectory(prefix="warmq-swaps-") as name:
        folder = Path(name)
        names = [f"m{number}" for number in range(chosen.models)]
        models = {each: workload.write_model(folder / each, chosen.shape) for each in names}
        before_mib = memory_mib()
        alone = offline(
            folder, engine | {"model": str(models["m0"]), "disable_log_stats": True}, wanted,
            chosen.models,
        )  # fmt: skip
        wait_for_free_memory(before_mib)
        record = Record(
            chosen, begin, weights_gib=round(workload.weights_bytes(chosen.shape) / GIB, 1),
            host_free_gib=round(machine().free / GIB, 1), models=chosen.models,
            requests=chosen.requests, batches=chosen.batches, output_tokens=chosen.output_tokens,
            prompt_tokens=chosen.prompt_tokens, max_num_seqs=chosen.max_num_seqs,
        )  # fmt: skip
        record.keep(offline_s=[round(one, 2) for one in alone])
        measure_queue(chosen, record, begin, folder, models, as_options(engine), wanted, sum(alone))


def measure_queue(
    chosen: argparse.Namespace, record: Record, begin: float, folder: Path, models: dict[str, Path],
    engine_args: str, wanted: Wanted, alone_s: float,
) -> None:  # fmt: skip
    """Run the rounds on one worker."""
    entries = {
        name: {"path": str(path), "engine_args": engine_args} for name, path in models.items()
    }
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log = folder / "worker.log"
    rounds: list[float] = []
    swaps: list[float] = []
    with (
        RedisServer(folder / "redis") as server,
        Worker(
            server.url,
            log,
            ROOT,
            env,
            models=json.dumps(entries),
            engine_log=folder / "vllm.log",
        ) as worker,
        Client(server.url) as client,
    ):
        try:
            store = BatchStore(server.client(), ttl_ms=3_600_000)
            watched = Watched(worker, store)
            eventually(watched.is_ready, START_S, "a loaded model", every_s=0.5)
            for number in range(-1, chosen.rounds):
                if number >= 0 and time.monotonic() - begin > chosen.seconds:
                    break
                few = wanted if number >= 0 else wanted[:64]
                seconds, found = through_the_queue(
                    server, client, watched, list(models), few,
                    chosen.batches if number >= 0 else 1,
                )  # fmt: skip
                told = {"seconds": round(seconds, 2), "swaps_s": [round(one, 2) for one in found]}
                print(json.dumps(told | {"memory_mib": memory_mib()}), flush=True)
                if number >= 0:
                    rounds.append(seconds)
                    swaps += found
                    record.keep(reached={
                        "seconds": report.spread(rounds, 1),
                        "to_offline": report.spread([one / alone_s for one in rounds], 3),
                        "swaps_s": report.spread(swaps, 2),
                    })  # fmt: skip
        finally:
            lines = log.read_text(errors="replace").splitlines()
            print("\n".join(line for line in lines if TOLD.search(line))[-6000:])
            keep_logs(folder, chosen.out)


if __name__ == "__main__":
    main()
