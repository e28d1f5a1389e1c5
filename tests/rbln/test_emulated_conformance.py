"""EMULATED: the RBLN path keeps what the drain relies on of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.engines.conformance import conform
from kit.engines.emulated_npu import STAND_IN, emulated_env

from demo.stack import ROOT, RedisServer

pytestmark = pytest.mark.timeout(300)


def test_the_engine_of_a_compiled_model_conforms(
    machine: tuple[RedisServer, Path], artefacts: dict[str, Path], tmp_path: Path
) -> None:
    cards = {"WARMQ_TEST_REBEL_CARDS": str(machine[1]), "PYTHONPATH": f"{STAND_IN}:{ROOT}"}
    conform(
        tmp_path, env=emulated_env(tmp_path) | cards,
        model=artefacts["plain"], rbln_devices="6", kill_grace_s=1,
    )  # fmt: skip
