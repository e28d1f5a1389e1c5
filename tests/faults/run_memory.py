"""The memory of one worker while a queue of many requests drains: JSON figures and a plot.

    run_memory.py [--requests 1000000]

Redis holds 1.1 GB at the start of the million. The figures are kept in
tests/faults/results/memory.json, the plot in docs/evidence/memory.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kit.commands.support import batch_file, run_producer  # noqa: E402
from kit.stacks.memory import Sample, Watched, growth  # noqa: E402

from contract.redis.batches import BatchStore  # noqa: E402
from demo.stack import RedisServer, Worker  # noqa: E402

#: Allowed by issue 3: growth after the first 10,000 requests.
BAR = 0.05
WARM = 10_000


def drain(requests: int, folder: Path) -> tuple[list[Sample], float]:
    """Queue all requests, then start a worker; return its samples and how long it took."""
    with RedisServer(folder / "redis", "--appendonly", "no") as server:
        part = 100_000
        for n in range(0, requests, part):
            path = batch_file(folder / "in", min(part, requests - n), prefix=f"p{n}-")
            done = run_producer("submit", path, redis_url=server.url)
            assert done.returncode == 0, done.stderr
        with server.client() as client:
            worker = Worker(
                server.url, folder / "worker.log", engine="simulated", simulated_slots=256,
                simulated_latency_s=0, lease_s=60,
            ).start()  # fmt: skip
            try:
                began = time.monotonic()
                watched = Watched(worker, BatchStore(client, ttl_ms=3_600_000))
                samples = watched.until(requests, every=requests // 500, timeout_s=3000)
                took = time.monotonic() - began
            finally:
                worker.kill()
    return samples, took


def plot(samples: list[Sample], path: Path) -> None:
    """Draw memory over requests completed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "warmq"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3))
    done, mb = zip(*[s for s in samples if s[0] > 0], strict=True)
    axes.plot(done, mb, linewidth=1.2)
    warm = next(m for d, m in samples if d >= WARM)
    axes.axhline(warm * (1 + BAR), linestyle="--", linewidth=0.8, color="tab:red")
    axes.text(0, warm * (1 + BAR), " 5 % above the memory at 10,000", va="bottom", fontsize=8)
    axes.set(xlabel="requests completed", ylabel="worker RSS in MB", ylim=(0, warm * 1.25))
    axes.xaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,.0f}"))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=1_000_000)
    requests = options.parse_args().requests
    with tempfile.TemporaryDirectory() as folder:
        samples, took = drain(requests, Path(folder))
    figures = {
        "requests": requests,
        "took_s": round(took, 1),
        "growth_after_10000": round(growth(samples, WARM), 4),
        "growth_after_10000_until_100000": round(
            growth([s for s in samples if s[0] <= 100_000], WARM), 4
        ),
        "rss_mb": samples,
    }
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "memory.json").write_text(json.dumps(figures) + "\n")
    plot(samples, ROOT / "docs/evidence/memory.svg")
    print({name: value for name, value in figures.items() if name != "rss_mb"})
    if figures["growth_after_10000"] > BAR:
        sys.exit("the worker's memory grew")


if __name__ == "__main__":
    main()
