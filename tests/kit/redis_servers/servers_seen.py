"""A pytest plugin of faults/run_servers.py: which servers the tests started, and how they ended.

Each server tells its own version, so that no test can have run on another one unnoticed.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import redis

from demo.stack import RedisServer


def version_of(server: RedisServer) -> str:
    """Return name and version of a running server, as `valkey 8.1.1`, from its INFO."""
    options = list(server.options)
    client = server.client()
    if "--requirepass" in options:
        password = options[options.index("--requirepass") + 1]
        client = redis.Redis(port=server.port, password=password, socket_timeout=10)
    with client:
        told = client.info("server")
    # Valkey says 7.2.4 where Redis has its version, for clients that look there.
    name = told.get("server_name", "redis")
    return f"{name} {told[f'{name}_version']}"


class Seen:
    """Counts servers by version, and tests by how they ended."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._servers: Counter[str] = Counter()
        self._tests: Counter[str] = Counter(passed=0, failed=0)
        #: Tests that passed, by the name of their file.
        self._files: Counter[str] = Counter()
        self._start = RedisServer.start

    def watch(self) -> None:
        """Ask every server that is started from now on."""
        seen = self

        def start(server: RedisServer, *more: str, wait: bool = True) -> RedisServer:
            seen._start(server, *more, wait=wait)
            if wait:
                seen._servers[version_of(server)] += 1
            return server

        RedisServer.start = start  # type: ignore[method-assign]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's call, and what fails before or after it."""
        if report.when == "call" or report.failed:
            self._tests[report.outcome] += 1
            self._files[Path(report.nodeid.partition("::")[0]).stem] += report.passed

    def pytest_sessionfinish(self) -> None:
        """Write what was seen."""
        RedisServer.start = self._start  # type: ignore[method-assign]
        self._out.write_text(
            json.dumps({"servers": self._servers, "tests": self._tests, "files": self._files})
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that says where to write."""
    parser.addoption("--seen", type=Path, required=True, help="file for what was seen")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch."""
    seen = Seen(config.getoption("--seen"))
    config.pluginmanager.register(seen, "servers-seen")
    seen.watch()
