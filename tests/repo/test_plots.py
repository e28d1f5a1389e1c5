"""docs/evidence/plots: drawn from the committed results, readable on a light and on a dark page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from bench.pages import plots

from demo.stack import ROOT


def test_the_plots_of_the_docs_are_those_of_the_committed_results(tmp_path: Path) -> None:
    written = {name for name, _ in plots.write(tmp_path)}
    assert "gpu.svg" in written
    stale = "out of date: run tests/bench/run.py --write-docs"
    assert written == {path.name for path in plots.FOLDER.glob("*.svg")}, stale
    page = (ROOT / "docs/evidence/measurements.md").read_text()
    for name in written:
        drawn, committed = (_without_ids(folder / name) for folder in (tmp_path, plots.FOLDER))
        assert drawn == committed, f"{name} {stale}"
        assert f"](plots/{name})" in page, stale


def _without_ids(path: Path) -> str:
    """Return a plot without its clip paths' ids: digests of floats, whose last bit is the CPU's."""
    return re.sub(r"\bp[0-9a-f]{10}\b", "clip", path.read_text())


def test_a_plot_has_its_labels_as_text_and_no_colour_that_a_page_may_have(tmp_path: Path) -> None:
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


def spread(*values: float) -> dict[str, float]:
    return {"median": sorted(values)[len(values) // 2], "min": min(values), "max": max(values)}


def phase(*names: str) -> dict[str, dict[str, list[float]]]:
    return {"trace": {"done": [0, 50, 100], **{name: [1.0, 60.0, 61.0] for name in names}}}


#: As the parts write them, with two points a line.
SMALL: dict[str, dict[str, Any]] = {
    "alternatives": {
        "names": {"warmq": "warmq", "ray": "Ray Data LLM"},
        "reached": {"warmq_tokens_per_s": spread(90, 100, 105),
                    "ray_tokens_per_s": spread(50, 51, 52), "warmq_to_ray": spread(1.9, 1.96, 2)},
    },
    "queues": {
        "versions": {"arq": "arq 0.28"},
        "reached": {"warmq_occupancy_64": spread(0.99), "warmq_occupancy_256": spread(0.98),
                    "arq_occupancy_64": spread(0.5), "arq_idle_ms_p50": spread(400)},
    },
    "scale": {
        "machine": {"cores": 2},
        "fleets": [{"workers": n, "latency_s": 0.2, "ideal_per_s": 1280.0 * n, "per_s": 1200.0 * n,
                    "machine_share": 0.2 * n, "redis_share": 0.1 * n} for n in (1, 2)],
    },
    "qa": {"tutorial_minutes": {"warmq": 16, "ngram": 5},
           "ways": {"warmq": {"to_warmq": 1.0}, "ngram": {"cannot_run": "it cannot"}}},
    "qa-8b-two-gpus": {"ways": {"one": {"to_warmq": 56.9}}},
    "size": {
        "phases": {"submit": phase("producer", "redis"), "drain": phase("worker", "redis"),
                   "collect": phase("producer", "redis"), "window": phase("producer", "redis")},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "texts"),
    [("alternatives", ("Ray Data LLM", "warmq is 1.96 ×")), ("occupancy", ("arq 0.28", "256")),
     ("scale", ("ideal", "2,560", "all 2 cores")), ("size", ("Redis' data, MB", "results")),
     ("qa", ("0.31", "57", "one by one"))],
)  # fmt: skip
def test_small_results_are_drawn(tmp_path: Path, name: str, texts: tuple[str, ...]) -> None:
    (draw,) = (draw for known, draw, _, _ in plots.PLOTS if known == name)
    plots.save(draw, SMALL, tmp_path / "plot.svg")
    root = ElementTree.fromstring((tmp_path / "plot.svg").read_bytes())
    shown = {"".join(element.itertext()).strip() for element in root.iter()}
    assert set(texts) <= shown
