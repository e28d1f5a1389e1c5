"""All routes under generated requests, valid and not: no 5xx, and only answers as documented."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from kit.gateways.live_stack import Stack
from kit.gateways.other_clients import program

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


@pytest.mark.timeout(240)
def test_no_generated_request_fails_the_gateway(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        done = subprocess.run(
            [program("st"), "run", f"{stack.gateway.url}/openapi.json", "--checks", CHECKS,
             "--max-examples", "30", "--continue-on-failure", "--generation-deterministic",
             "--request-timeout", "15", "--no-color"],
            cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases is not None
    assert int(cases[1]) > 2000, done.stdout[-2000:]
    (operations,) = re.findall(r"Tested: (\d+)", done.stdout)
    (selected,) = re.findall(r"Selected: (\d+)/\d+", done.stdout)
    assert operations == selected
