"""docs/tutorials/npu.md as it stands there, on an EMULATED NPU: only the port is another."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from kit.commands.pages import TUTORIALS, Reader
from kit.engines.emulated_npu import emulated_env

from demo.stack import ROOT


@pytest.mark.timeout(600)
def test_every_command_of_the_npu_tutorial_does_what_the_page_says(tmp_path: Path) -> None:
    control = tmp_path / "rebel"
    control.mkdir()
    emulated = emulated_env(control)
    emulated["PYTHONPATH"] += os.pathsep + str(ROOT)
    with Reader(tmp_path, Path(sys.prefix), env=emulated) as reader:
        left_out = reader.follow(TUTORIALS / "npu.md")
    assert len(left_out) == 5, left_out  # each stands under words that say so
