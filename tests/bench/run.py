"""`make bench`: measures warmq and writes tests/bench/results/<part>.json.

    run.py [PART|all] [--quick] [--model FOLDER]
    run.py --write-docs      put the figures into docs/evidence/measurements.md

Each part can run alone. `all` runs every part in a process of its own, so that
no part's memory or threads are in another's figures.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

#: Each part's module in its room (README.md), in the order they run.
PARTS = {
    "overhead": "worker_cost.overhead",
    "latency": "worker_cost.latency",
    "observed": "worker_cost.observed",
    "submit": "producer_cost.submission",
    "reuse": "producer_cost.reuse",
    "order": "producer_cost.ordering",
    "results": "producer_cost.collection",
    "admission": "worker_cost.admission",
    "instructions": "worker_cost.instructions",
    "traced": "worker_cost.traced",
    "redis": "redis_cost.redis_times",
    "large": "redis_cost.large_messages",
    "alternatives": "peers.alternatives",
    "queues": "peers.queues",
    "scale": "worker_cost.scale",
    "fairness": "fairness.shares",
    "many_tenants": "fairness.many",
    "size": "producer_cost.size",
    "clients": "openai_servers.clients",
    "upstream": "openai_servers.upstream",
    "throughput": "beside_vllm.throughput",
    "short": "beside_vllm.short",
    "pooling_short": "beside_vllm.pooling_short",
    "streaming": "beside_vllm.streaming",
    "structured": "beside_vllm.structured",
    "policy": "beside_vllm.policy",
    "gateway_online": "gateway.online",
    "gateway_streamed": "gateway.streamed",
    "gateway_carrying": "gateway.carrying",
    "gateway_gigabyte": "gateway.gigabyte",
    "gateway_beside": "gateway.beside_batch",
}


def run_part(part: str, *, quick: bool, model: Path) -> None:
    """Run one part here, print its figures, and save them unless they are a look only."""
    from bench.common import report

    module = importlib.import_module(f"bench.{PARTS[part]}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with report.LoadWatch() as load:
        if PARTS[part].startswith("beside_vllm."):
            measured = asyncio.run(module.measure(quick, model))
        else:
            measured = module.measure(quick)
    told = {"expected": getattr(module, "EXPECTED", {}), "bars": getattr(module, "BARS", {})}
    data = told | {"load_average": load.ends()} | measured
    if not quick:
        report.save(part, data)
    if hasattr(module, "show"):
        module.show(data)
    else:
        report.figures(module.TITLE, data)


def main() -> int:
    """Parse the command line and run; return the exit status."""
    from demo.stack import MODEL

    parser = argparse.ArgumentParser(description="measure warmq on this machine")
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument(
        "--quick", action="store_true", help="few and short repeats, a look only: saves nothing"
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="model of `throughput`")
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="write docs/evidence/measurements.md's tables, run nothing",
    )
    chosen = parser.parse_args()
    if chosen.write_docs:
        from bench.pages import tables

        tables.write()
        return 0
    if chosen.part != "all":
        run_part(chosen.part, quick=chosen.quick, model=chosen.model)
        return 0
    status = 0
    for part in PARTS:
        print(f"== {part} (load {os.getloadavg()[0]:.1f}) ==", flush=True)
        command = [sys.executable, __file__, part, "--model", str(chosen.model)]
        done = subprocess.run([*command, *(["--quick"] if chosen.quick else [])], check=False)
        status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
