"""docs/plots: drawn from the committed results, readable on a light and on a dark page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from demo.stack import ROOT


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's module; its own folder is where it finds the others."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    import plots

    return plots


def test_the_plots_of_the_docs_are_those_of_the_committed_results(
    plots: ModuleType, tmp_path: Path
) -> None:
    written = {name for name, _ in plots.write(tmp_path)}
    assert "gpu.svg" in written
    stale = "out of date: run tests/bench/run.py --write-docs"
    assert written == {path.name for path in plots.FOLDER.glob("*.svg")}, stale
    page = (ROOT / "docs" / "performance.md").read_text()
    for name in written:
        assert (tmp_path / name).read_bytes() == (plots.FOLDER / name).read_bytes(), (
            f"{name} {stale}"
        )
        assert f"](plots/{name})" in page, stale


def test_a_plot_has_its_labels_as_text_and_no_colour_that_a_page_may_have(
    plots: ModuleType, tmp_path: Path
) -> None:
    plots.write(tmp_path)
    for path in tmp_path.glob("*.svg"):
        root = ElementTree.fromstring(path.read_bytes())
        assert "".join(root.itertext()).strip()
        for colour in re.findall(r"(?:fill|stroke): #([0-9a-f]{6})", path.read_text()):
            grey = sum(int(colour[n : n + 2], 16) for n in (0, 2, 4)) / 3
            assert 60 < grey < 200, (path.name, colour)
    text = (tmp_path / "gpu.svg").read_text()
    assert "warmq ÷ engine alone" in text
    assert "8B, 256 slots" in text
