"""What holds Redis up: its SLOWLOG and LATENCY monitor over submit, drain and results.

One file goes through commands and a worker with the simulated engine at its ceiling, so that every
script runs with as much as it ever takes at once. Redis persists as it does by default here.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import redis
from bench.common import report
from bench.common.load import wait_ready
from bench.common.probe import Probe
from bench.producer_cost.submission import PRODUCER, timed, write_file

from contract.redis.scripts import PACKAGES, source
from demo.stack import RedisServer

#: Commands that take longer are logged, in us.
SLOW_US = 1000
LOGGED = 100_000
EXPECTED = {
    "written": "before the first run",
    "submit_slowest_ms": 4,
    "drain_slowest_ms": 3,
    "results_slowest_ms": 1.5,
    "why": "ENQUEUE of 500 lines takes 500 x 5 us; DONE and POP of some 300 requests 10 us each; "
    "MGET of 250 results",
}


def scripts() -> dict[str, str]:
    """Return the scripts' names by the digest that EVALSHA takes."""
    paths = (path for package in PACKAGES for path in (files(package) / "lua").iterdir())
    names = (path.name.partition(".")[0] for path in paths)
    return {hashlib.sha1(source(n).encode()).hexdigest(): n for n in names}


class Watch:
    """Reads what Redis has noticed, one phase after another."""

    def __init__(self, client: redis.Redis) -> None:
        self._client, self._scripts = client, scripts()
        client.config_set("slowlog-log-slower-than", SLOW_US)
        client.config_set("slowlog-max-len", LOGGED)
        client.config_set("latency-monitor-threshold", 1)
        self.found: dict[str, Any] = {}
        self.forget()

    def forget(self) -> None:
        """Begin a phase."""
        self._client.slowlog_reset()
        self._client.latency_reset()

    def keep(self, phase: str) -> None:
        """End a phase: commands above 1 ms by script, and LATENCY's events, in ms."""
        slow: dict[str, list[float]] = defaultdict(list)
        for entry in self._client.slowlog_get(LOGGED):
            slow[self._name(entry["command"])].append(entry["duration"] / 1000)
        events = {name.decode(): worst for name, _, _, worst in self._client.latency_latest()}
        self.found[phase] = {
            "slow": {name: {"count": len(times), "slowest_ms": round(max(times), 2)}
                     for name, times in sorted(slow.items())},
            "latency_events_ms": events,
        }  # fmt: skip
        self.forget()

    def _name(self, command: bytes) -> str:
        words = command.decode(errors="replace").split()
        if words[0].upper() == "EVALSHA":
            return self._scripts.get(words[1], words[1]).upper()
        return words[0].upper()

    def slowest(self, phase: str) -> float:
        """Return the phase's slowest command in ms, 0 where none took a millisecond."""
        return max((s["slowest_ms"] for s in self.found[phase]["slow"].values()), default=0)


def measure(quick: bool) -> dict[str, Any]:
    """Run the three phases; return the part's figures."""
    lines = 10_000 if quick else 100_000
    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        folder = Path(name)
        path = folder / "in.jsonl"
        write_file(path, lines)
        with RedisServer(folder / "redis") as server, server.client() as client:
            watch = Watch(client)
            timed([str(PRODUCER), "submit", str(path), "--batch-id", "b"], server.url)
            watch.keep("submit")
            settings = {"simulated_slots": 256, "simulated_latency_s": 0}
            with Probe(server.url, folder / "seen.json", **settings):
                wait_ready(client)
                timed([str(PRODUCER), "watch", "b"], server.url)
            watch.keep("drain")
            timed([str(PRODUCER), "results", "b", "-o", str(folder / "out.jsonl")], server.url)
            watch.keep("results")
    return {
        "lines": lines, "slow_us": SLOW_US,
        "reached": {f"{phase}_slowest_ms": report.spread([watch.slowest(phase)], 2)
                    for phase in watch.found},
        "phases": watch.found,
    }  # fmt: skip


def show(data: dict[str, Any]) -> None:
    """Print the commands by phase."""
    report.table(
        f"commands of Redis above {SLOW_US / 1000:g} ms while {data['lines']:,} requests pass",
        ("phase", "command", "how many", "slowest, ms"),
        [
            (phase, name, str(slow["count"]), str(slow["slowest_ms"]))
            for phase, found in data["phases"].items() for name, slow in found["slow"].items()
        ],
    )  # fmt: skip
    for phase, found in data["phases"].items():
        print(f"{phase}: LATENCY {found['latency_events_ms']}")
