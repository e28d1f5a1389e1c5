"""warmq on several GPUs of one host against as many `LLM.generate`, run after run in turn.

    several.py --gpus 2 --shape 1b --out FILE [--rounds 5] [--requests 8000]
               [--forms offline,workers,replicas] [--max-num-seqs 256] [--kv-gib 8]
               [--output-tokens 1 4] [--prompt-tokens 8 32] [--engine JSON] [--seconds 500]

offline   a process a GPU, each with its part of the requests; the slowest one counts
workers   a worker a GPU, all on one Redis
replicas  one worker with --data-parallel-size and as many front ends
one       one worker with --data-parallel-size and one front end
shards    one worker with --tensor-parallel-size

All engines share the GPUs, each with its own weights and KV cache; only one form works at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from bench.common import report
from bench.common.load import hold
from bench.gpu import workload
from bench.gpu.pairs import (
    ENGINE,
    GIB,
    HERE,
    ROOT,
    RUN_S,
    START_S,
    Peer,
    as_options,
    interval,
)
from bench.gpu.record import Record, options

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually


class Offline:
    """`LLM.generate` on each GPU."""

    def __init__(self, stack: ExitStack, folder: Path, engine: dict[str, Any], gpus: int) -> None:
        cache = os.environ.get("VLLM_CACHE_ROOT", str(folder / "cache")) + "-offline"
        path = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(HERE / "offline.py"), "ADDRESS", json.dumps(engine)]
        self.peers = [
            Peer(f"offline-{gpu}", folder, command, {
                "CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": path,
                "VLLM_CACHE_ROOT": f"{cache}-{gpu}",
            }) for gpu in range(gpus)
        ]  # fmt: skip
        for peer in self.peers:
            stack.callback(peer.stop)

    def wait_ready(self) -> None:
        """Wait for all engines."""
        for peer in self.peers:
            peer.wait_ready()

    def seconds(self, wanted: Sequence[tuple[str, int]], folder: Path) -> float:
        """Run the requests, dealt out like cards; return how long the slowest took."""
        parts = [wanted[gpu :: len(self.peers)] for gpu in range(len(self.peers))]
        for gpu, part in enumerate(parts):
            (folder / f"part-{gpu}.json").write_text(json.dumps(part))
        with ThreadPoolExecutor(len(parts)) as pool:
            asked = [
                pool.submit(peer.ask, file=str(folder / f"part-{gpu}.json"))
                for gpu, peer in enumerate(self.peers)
            ]
            return max(float(one.result()["seconds"]) for one in asked)


class Fleet:
    """Workers on a Redis of their own."""

    def __init__(
        self, stack: ExitStack, folder: Path, name: str, model: Path, slots: int,
        each: Sequence[tuple[dict[str, str], dict[str, object]]],
    ) -> None:  # fmt: skip
        (folder / name).mkdir()
        self.server = stack.enter_context(RedisServer(folder / name))
        self._slots = slots
        self._log = folder / f"{name}-0.log"
        self._runs = 0
        for number, (env, settings) in enumerate(each):
            log = folder / f"{name}-{number}.log"
            worker = Worker(self.server.url, log, ROOT, env, model=model, **settings)
            stack.enter_context(worker)

    def wait_ready(self) -> None:
        """Wait until all slots of all front ends are announced."""
        with self.server.client() as client:
            store = BatchStore(client, ttl_ms=3_600_000)

            def ready() -> bool:
                alive = store.workers(naming.DEFAULT_QUEUE)
                return sum(worker.get("slots", 0) for worker in alive) == self._slots

            eventually(ready, START_S, f"ready:\n{self._log.read_text(errors='replace')[-4000:]}")

    def seconds(self, wanted: Sequence[tuple[str, int]], _: Path) -> float:
        """Run the requests through the queue."""
        self._runs += 1
        with self.server.client() as client:
            held = hold(
                client, f"gpu{self._runs}", len(wanted), lambda n: workload.body(wanted[n - 1])
            )
            time.sleep(0.2)
            began = held.release()
            seconds = held.wait(RUN_S) - began
            ended = client.hgetall(keys.batch_key(held.batch.id))
            client.flushdb()
        assert int(ended[b"completed"]) == len(wanted), ended
        assert int(ended[b"completion_tokens"]) == sum(tokens for _, tokens in wanted), ended
        assert int(ended[b"prompt_tokens"]) == sum(len(prompt) for prompt, _ in wanted), ended
        return seconds


@contextmanager
def started(
    chosen: argparse.Namespace, forms: Sequence[str]
) -> Iterator[tuple[dict[str, Any], Path]]:
    """Start all engines at once and wait for them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmq-gpus-")))
        model = workload.write_model(folder / f"llama-{chosen.shape}", chosen.shape)
        engine = ENGINE | {
            "max_num_seqs": chosen.max_num_seqs,
            "kv_cache_memory_bytes": int(chosen.kv_gib * GIB),
        } | json.loads(chosen.engine)  # fmt: skip
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        options, gpus, slots = as_options(engine), chosen.gpus, chosen.max_num_seqs
        env = {"PYTHONPATH": path}
        own = [
            (env | {"CUDA_VISIBLE_DEVICES": str(gpu)}, {"engine_args": options})
            for gpu in range(gpus)
        ]
        replicas = f"{options} --data-parallel-size {gpus}"
        shards = f"{options} --tensor-parallel-size {gpus}"
        fleets: dict[str, tuple[int, list[Any]]] = {
            "workers": (gpus * slots, own),
            "replicas": (gpus * slots, [(env, {"engine_args": replicas, "front_ends": gpus})]),
            "one": (gpus * slots, [(env, {"engine_args": replicas, "front_ends": 1})]),
            "shards": (slots, [(env, {"engine_args": shards})]),
        }
        found: dict[str, Any] = {}
        for form in forms:
            if form == "offline":
                arguments = engine | {"model": str(model), "disable_log_stats": True}
                found[form] = Offline(stack, folder, arguments, gpus)
            else:
                found[form] = Fleet(stack, folder, form, model, *fleets[form])
        for each in found.values():
            each.wait_ready()
        yield found, folder


def main() -> None:
    """Measure; write what there is after every round."""
    parser = options(__doc__ or "", shape="1b", rounds=5)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--forms", default="offline,workers,replicas")
    parser.add_argument("--requests", type=int, default=8000, help="for each GPU")
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(1, 4))
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(8, 32))
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-gib", type=float, default=8, help="KV cache of each engine")
    parser.add_argument("--engine", default="{}", help="more engine arguments, as JSON")
    chosen = parser.parse_args()
    begin, forms = time.monotonic(), chosen.forms.split(",")
    count = chosen.requests * chosen.gpus
    wanted = workload.requests(count, chosen.output_tokens, chosen.prompt_tokens)
    rounds: list[dict[str, float]] = []
    with started(chosen, forms) as (ways, folder):
        record = Record(
            chosen, begin, gpus=chosen.gpus, requests=count, output_tokens=chosen.output_tokens,
            prompt_tokens=chosen.prompt_tokens, max_num_seqs=chosen.max_num_seqs,
            engine=json.loads(chosen.engine),
        )  # fmt: skip
        for number in range(-1, chosen.rounds):
            if time.monotonic() - begin > chosen.seconds:
                break
            order = report.in_turn(forms, number)
            one = {form: round(count / ways[form].seconds(wanted, folder), 1) for form in order}
            print(json.dumps(one), flush=True)
            if number >= 0:  # the first one warms up
                rounds.append(one)
            record.keep(reached=reached(rounds, forms))
    print(json.dumps(record.data["reached"]))


def reached(rounds: Sequence[dict[str, float]], forms: Sequence[str]) -> dict[str, Any]:
    """Return requests a second, and paired ratios to the first form, of this host and hour."""
    if not rounds:
        return {}
    found: dict[str, Any] = {
        f"{form}_requests_per_s": report.spread([one[form] for one in rounds], 1) for form in forms
    }
    for form in forms[1:]:
        found[f"{form}_to_{forms[0]}"] = interval([one[form] / one[forms[0]] for one in rounds])
    return found


if __name__ == "__main__":
    main()
