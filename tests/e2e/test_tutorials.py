"""Every command of docs/tutorials as it stands there, in a fresh clone: only the ports are others.

The page for NPUs is followed in the environment of its packages, by tests/rbln.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kit.commands.pages import TUTORIALS, Reader

#: Page and what of it no machine of ours can run: it says so beside each such line.
PAGES = {
    "cpu-laptop": 1,
    "one-gpu": 4,
    "existing-vllm-serve": 2,
    "openai-batch-file": 0,
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_a_tutorial_does_what_the_page_says(name: str, tmp_path: Path) -> None:
    with Reader(tmp_path, Path(sys.prefix), ports=("6379", "8000")) as reader:
        left_out = reader.follow(TUTORIALS / f"{name}.md")
    assert len(left_out) == PAGES[name], left_out
