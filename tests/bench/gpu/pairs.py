"""warmq against the engine alone on one GPU, run after run in turn, all engines warm.

    pairs.py --shape 8b --out FILE [--rounds 10] [--requests 1000] [--max-num-seqs 256]
             [--output-tokens 16 256] [--prompt-tokens 64 512] [--forms offline,bare,queue]
             [--look-aheads 0,16,64,128] [--seconds 500]
    pairs.py --shape 1b --pooling embed --prompt-tokens 32 32 --requests 20000 --out FILE

With --pooling texts are embedded, or scored, and `offline` is `LLM.embed` or `LLM.score`.

Two engines share the GPU, each with its own weights and KV cache: one in a process
that calls `LLM.generate` (form `offline`), one in the real worker process (`queue`,
and past the queue `bare`, `all`, `classes`, `full`; inside.py). Only one of them works at a
time. Each round runs every form once, the order rotates. Needs vLLM >= 0.26 with
CUDA and redis-server; no network.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

from bench.common import report
from bench.common.load import hold
from bench.gpu import workload
from bench.gpu.record import Record, options

from contract.redis import keys
from demo.stack import RedisServer, procfile_command

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
GIB = 2**30
#: The same for both engines; LLM and AsyncLLM have different defaults.
ENGINE: dict[str, Any] = {
    "load_format": "dummy", "max_num_batched_tokens": 8192, "max_model_len": 1024,
    "enable_prefix_caching": False, "gpu_memory_utilization": 0.35, "seed": 0,
}  # fmt: skip
#: What a run tells beside its rates.
FIGURES = (
    "seconds", "cpu_s", "running_per_step", "tokens_per_step", "steps_until_full",
    "steps_without_waiting",
)  # fmt: skip
START_S = 420.0
RUN_S = 200.0


def as_options(engine: dict[str, Any]) -> str:
    """Return engine arguments as vLLM's command line has them."""
    words = []
    for name, value in engine.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return " ".join(words)


class Peer:
    """A process that runs requests when it is asked to."""

    def __init__(self, name: str, folder: Path, command: Sequence[str], env: dict[str, str]):
        self.name = name
        self.log = folder / f"{name}.log"
        address = str(folder / f"{name}.sock")
        self._listener = Listener(address, "AF_UNIX")
        self._lines: list[Connection] = []
        threading.Thread(target=self._accept, daemon=True).start()
        words = [word.replace("ADDRESS", address) for word in command]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, stdout=log, stderr=log,
                env=os.environ | {"BENCH_ADDRESS": address} | env, start_new_session=True,
            )  # fmt: skip

    def _accept(self) -> None:
        self._lines.append(self._listener.accept())

    def wait_ready(self) -> None:
        """Wait for its engine."""
        deadline = time.monotonic() + START_S
        while not self._lines:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start:\n{self.tail()}")
            time.sleep(0.2)
        self._receive(START_S)

    def ask(self, **what: Any) -> dict[str, Any]:
        """Ask for one thing and wait for the answer."""
        self._lines[0].send(what)
        answer: dict[str, Any] = self._receive(RUN_S)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}\n{self.tail()}")
        return answer

    def _receive(self, timeout_s: float) -> Any:
        if not self._lines[0].poll(timeout_s):
            raise RuntimeError(f"{self.name} says nothing:\n{self.tail()}")
        try:
            return self._lines[0].recv()
        except EOFError:
            with suppress(subprocess.TimeoutExpired):  # its log is not at the end yet
                self.process.wait(10)
            raise RuntimeError(f"{self.name} has ended:\n{self.tail()}") from None

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-5000:]

    def stop(self) -> None:
        """End it with its engine's processes, which keep the GPU's memory otherwise."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._listener.close()


class Bench:
    """Both engines and Redis."""

    def __init__(
        self, server: RedisServer, peers: dict[str, Peer], count: int, tokens: Sequence[int],
        letters: Sequence[int], pooling: str | None = None,
    ) -> None:  # fmt: skip
        self.server, self.peers, self.count, self.pooling = server, peers, count, pooling
        tokens = (0, 0) if pooling else tokens
        self.asked = {"count": count, "tokens": tokens, "letters": letters, "pooling": pooling}
        self.wanted = workload.requests(count, tokens, letters)
        self.written = sum(tokens for _, tokens in self.wanted)
        #: Each letter is a token.
        self.read = sum(len(prompt) for prompt, _ in self.wanted)
        #: What is told a second: tokens of answers, or of texts where there are no answers.
        self.tokens = self.read if pooling else self.written
        self.runs = 0

    def time(self, form: str) -> dict[str, Any]:
        """Run all requests one way."""
        self.runs += 1
        if form == "offline":
            found = self.peers["offline"].ask(**self.asked)
        elif form == "queue":
            found = self._queue()
        else:
            found = self.peers["worker"].ask(do="direct", form=form, **self.asked)
        assert found.get("prompt_tokens", self.read) == self.read, found
        rates = {"tokens_per_s": self.tokens, "requests_per_s": self.count}
        found = {"form": form} | {k: v / found["seconds"] for k, v in rates.items()} | found
        print(json.dumps(found), flush=True)
        return found

    def _queue(self) -> dict[str, Any]:
        worker, client = self.peers["worker"], self.server.client()
        held = hold(
            client, f"gpu{self.runs}", self.count,
            lambda n: workload.body(self.wanted[n - 1], self.pooling),
            url=workload.url(self.pooling),
        )  # fmt: skip
        time.sleep(0.2)
        worker.ask(do="watch", count=self.count, pooling=self.pooling)
        began = held.release()
        seconds = held.wait(RUN_S) - began
        found = {"seconds": seconds} | worker.ask(do="watched")
        ended = client.hgetall(keys.batch_key(held.batch.id))
        client.flushdb()
        client.close()
        assert int(ended[b"completed"]) == self.count, ended
        assert int(ended.get(b"completion_tokens", 0)) == self.written, ended
        assert int(ended[b"prompt_tokens"]) == self.read, ended
        return found


def interval(ratios: Sequence[float], draws: int = 10_000) -> dict[str, Any]:
    """Return the median of paired ratios with its bootstrap 95 % interval.

    It is of one host and one hour: on another host the same pairs scattered 20 times as wide.
    """
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    low, high = medians[int(0.025 * draws)], medians[int(0.975 * draws)]
    return report.spread(ratios, 4) | {"low": round(low, 4), "high": round(high, 4)}


def reached(rounds: Sequence[dict[str, dict[str, Any]]], forms: Sequence[str]) -> dict[str, Any]:
    """Return rates, paired ratios and means per engine step."""
    found: dict[str, Any] = {}
    for form in forms:
        mine = [turn[form] for turn in rounds if form in turn]
        if mine:
            for rate in ("tokens_per_s", "requests_per_s"):
                found[f"{form}_{rate}"] = report.spread([r[rate] for r in mine], 0)
        for figure in FIGURES:
            values = [run[figure] for run in mine if figure in run]
            if values:
                found[f"{form}_{figure}"] = report.spread(values, 3)
    for over in ("queue", "classes", "full"):
        for base in ("offline", "all", "bare"):
            ratios = [
                turn[over]["tokens_per_s"] / turn[base]["tokens_per_s"]
                for turn in rounds
                if over in turn and base in turn
            ]
            if ratios:
                found[f"{over}_to_{base}"] = interval(ratios)
    return found


def swept(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return tokens/s by look-ahead, each over the median of its round, and full steps."""
    found: dict[str, Any] = {}
    for ahead in rounds[0] if rounds else ():
        runs = [(turn[ahead], turn.values()) for turn in rounds if ahead in turn]
        found[ahead] = {
            "to_round": report.spread([
                mine["tokens_per_s"] / statistics.median(one["tokens_per_s"] for one in turn)
                for mine, turn in runs
            ], 4),
            "running_per_step": report.spread([r.get("running_per_step", 0) for r, _ in runs], 2),
            "steps_without_waiting": report.spread(
                [r.get("steps_without_waiting", 0) for r, _ in runs], 4
            ),
        }  # fmt: skip
    return found


@contextmanager
def started(chosen: argparse.Namespace, forms: Sequence[str]) -> Iterator[Bench]:
    """Start Redis and both engines at once; compile caches apart, so that they do not meet."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmq-gpu-")))
        server = stack.enter_context(RedisServer(folder))
        model = chosen.model or workload.write_model(folder / f"llama-{chosen.shape}", chosen.shape)
        options = engine_of(chosen)
        path = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        python_path = os.pathsep.join(path).rstrip(os.pathsep)
        peers: dict[str, Peer] = {}
        if "offline" in forms:
            cache = os.environ.get("VLLM_CACHE_ROOT", str(folder / "cache")) + "-offline"
            command = [sys.executable, str(HERE / "offline.py"), "ADDRESS"]
            engine = json.dumps({"model": str(model), "disable_log_stats": True} | options)
            peers["offline"] = Peer("offline", folder, [*command, engine], {
                "VLLM_CACHE_ROOT": cache, "PYTHONPATH": python_path,
            })  # fmt: skip
        peers["worker"] = Peer(
            "worker", folder, [*procfile_command(), "--include=bench.gpu.inside"], {
                "WARMQ_REDIS_URL": server.url, "WARMQ_MODEL": str(model),
                "WARMQ_ENGINE_ARGS": as_options(options),
                "PYTHONPATH": python_path,
            },
        )  # fmt: skip
        for peer in peers.values():
            stack.callback(peer.stop)
        for peer in peers.values():
            peer.wait_ready()
        yield Bench(
            server, peers, chosen.requests, chosen.output_tokens, chosen.prompt_tokens,
            chosen.pooling,
        )  # fmt: skip


def engine_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the engines' arguments; the KV cache is given, as two engines share the memory."""
    given = {"kv_cache_memory_bytes": int(chosen.kv_gib * GIB)}
    extra = (workload.POOLING_ENGINE if chosen.pooling else {}) | json.loads(chosen.engine)
    return ENGINE | {"max_num_seqs": chosen.max_num_seqs} | given | extra


def main() -> None:
    """Measure; write what there is after every round."""
    parser = options(__doc__ or "", rounds=10)
    parser.add_argument("--model", type=Path, help="a model folder instead of --shape")
    parser.add_argument("--forms", default="offline,bare,queue")
    parser.add_argument("--look-aheads", default="", help="swept after the rounds, e.g. 0,16,64")
    parser.add_argument("--sweeps", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(16, 256))
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(64, 512))
    parser.add_argument("--pooling", choices=workload.POOLING, help="texts in, numbers out")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-gib", type=float, default=40, help="KV cache of each engine")
    parser.add_argument("--engine", default="{}", help="more engine arguments, as JSON")
    chosen = parser.parse_args()
    begin = time.monotonic()
    forms = chosen.forms.split(",")
    aheads = [int(word) for word in chosen.look_aheads.split(",") if word]
    rounds: list[dict[str, dict[str, Any]]] = []
    sweeps: list[dict[str, dict[str, Any]]] = []

    def late() -> bool:
        return time.monotonic() - begin > chosen.seconds

    def save() -> None:
        record.keep(reached=reached(rounds, forms), look_ahead=swept(sweeps))

    with started(chosen, forms) as bench:
        record = Record(
            chosen, begin, engine=engine_of(chosen), requests=chosen.requests,
            output_tokens=chosen.output_tokens, pooling=chosen.pooling,
            prompt_tokens=chosen.prompt_tokens, tokens=bench.tokens,
            limit=bench.peers["worker"].ask(do="size", look_ahead=None),
        )  # fmt: skip
        for form in forms:
            bench.time(form)  # warms it up, and is not counted
        for number in range(chosen.rounds):
            if late():
                break
            rounds.append({form: bench.time(form) for form in report.in_turn(forms, number)})
            save()
        for number in range(chosen.sweeps if aheads else 0):
            if late():
                break
            found: dict[str, dict[str, Any]] = {}
            for ahead in aheads if number % 2 == 0 else aheads[::-1]:
                bench.peers["worker"].ask(do="size", look_ahead=ahead)
                found[str(ahead)] = bench.time("queue")
            sweeps.append(found)
            save()
        save()
    print(json.dumps(record.data["reached"] | {"look_ahead": record.data["look_ahead"]}))


if __name__ == "__main__":
    main()
