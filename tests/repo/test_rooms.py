"""What import-linter cannot see: who holds Redis' clients, and what a command loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.stack import ROOT

#: Where a client of Redis may be touched: the store, and the worker's side of the protocol.
STORE = (
    "contract/redis/",
    "gateway/redis/",
    "producer/redis.py",
    "producer/outage.py",
    "contract/streaming.py",
    "worker/process/broker.py",
    "worker/drain/wakeup.py",
    "worker/drain/scripts.py",
    "worker/drain/leases.py",
)
#: Names under which a client, or its connections, could be reached from outside.
CLIENTS = {"redis", "_redis", "_client", "_raw_client", "connection_pool"}


def touches(text: str) -> Iterator[str]:
    """Yield the imports of redis-py, and where an object takes another one's client."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "redis")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "redis":
            yield str(node.module)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            yield from [ast.unparse(node)] if node.attr in CLIENTS else []


def outside() -> Iterator[Path]:
    for side in ("contract", "gateway", "producer", "worker"):
        for path in (ROOT / side).rglob("*.py"):
            if not str(path.relative_to(ROOT)).startswith(STORE):
                yield path


def test_nobody_outside_the_store_touches_a_client_of_redis() -> None:
    found = {str(path.relative_to(ROOT)): list(touches(path.read_text())) for path in outside()}
    assert len(found) > 50
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("text", ["import redis.asyncio", "from redis import Redis",
                                  "self._store.redis.close()", "store._client"])  # fmt: skip
def test_a_touch_is_seen(text: str) -> None:
    assert list(touches(text))


@pytest.mark.parametrize("command", ["submit", "run", "batches", "results"])
def test_commands_that_plan_nothing_do_not_wait_for_numpy(command: str) -> None:
    # It takes a tenth of a second to load, half of what `producer status` takes in all.
    words = f"import sys, producer.cli.commands.{command}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], cwd=ROOT, check=False).returncode == 0
