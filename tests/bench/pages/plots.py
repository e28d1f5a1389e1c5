"""Draws docs/evidence/plots/*.svg from tests/bench/results/*.json.

The background is transparent and all colours are of middle brightness, so that a plot reads on
a light page and on a dark one. Text stays text.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from bench.common import report

mpl.use("svg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = report.ROOT / "docs/evidence/plots"
GREY, BLUE, ORANGE, GREEN = "#7d8590", "#3d85c6", "#cf7b26", "#3f9b57"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "warmq", "font.family": "sans-serif", "font.size": 9,
    "text.color": GREY, "axes.labelcolor": GREY, "axes.edgecolor": GREY, "axes.titlesize": 9,
    "axes.titlecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "lines.linewidth": 1.4,
}  # fmt: skip
Results = Mapping[str, dict[str, Any]]


def _figure(*axes: Axes) -> Figure:
    figure = axes[0].figure
    assert isinstance(figure, Figure)
    return figure


def _axes(panels: int = 1, height: float = 2.8) -> list[Axes]:
    figure = Figure(figsize=(7, height), layout="constrained")
    return [figure.add_subplot(1, panels, n + 1) for n in range(panels)]


def _range(found: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return a spread's median, and how far below and above it its ends are."""
    median = found["median"]
    return median, median - found["min"], found["max"] - median


def _thousands(axis: Any) -> None:
    axis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,.0f}"))


def alternatives(parts: Results) -> Figure:
    """Tokens/s of every way to run the same file, with warmq's ratio to it."""
    found = parts["alternatives"]
    names, reached = found["names"], found["reached"]
    (axes,) = _axes(height=0.7 + 0.3 * len(names))
    for row, key in enumerate(names):
        median, below, above = _range(reached[f"{key}_tokens_per_s"])
        axes.barh(row, median, height=0.6, color=ORANGE if key == "warmq" else BLUE)
        axes.errorbar(median, row, xerr=[[below], [above]], color=GREY, capsize=3)
        if ratio := reached.get(f"warmq_to_{key}"):
            axes.annotate(f"warmq is {ratio['median']:.2f} ×", (median + above, row), (6, -3),
                          textcoords="offset points")  # fmt: skip
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.invert_yaxis()
    axes.margins(x=0.18)
    _thousands(axes.xaxis)
    axes.set_xlabel("tokens/s while generating: median, least, greatest")
    return _figure(axes)


def occupancy(parts: Results) -> Figure:
    """Share of slot-seconds used by each queue, by the number of slots."""
    (axes,) = _axes()
    queues: dict[str, dict[int, dict[str, Any]]] = {}
    for figure, found in parts["queues"]["reached"].items():
        name, cut, slots = figure.partition("_occupancy_")
        if cut:
            queues.setdefault(name, {})[int(slots)] = found
    titles = {"warmq": "warmq", "celery": "Celery, threads"} | parts["queues"]["versions"]
    colours = (ORANGE, BLUE, GREEN, GREY)
    for (name, by_slots), colour in zip(queues.items(), colours, strict=False):
        slots = sorted(by_slots)
        middle, below, above = zip(*(_range(by_slots[n]) for n in slots), strict=True)
        axes.errorbar(slots, [100 * v for v in middle], color=colour, marker="o", capsize=3,
                      yerr=[[100 * v for v in side] for side in (below, above)],
                      label=titles[name])  # fmt: skip
    every = sorted({slots for by_slots in queues.values() for slots in by_slots})
    axes.set(xscale="log", ylim=(0, 103), xlabel="slots (simulated engine, 200 ms)",
             ylabel="slot-seconds used, %")  # fmt: skip
    axes.set_xticks(every, list(map(str, every)))
    axes.minorticks_off()
    axes.legend()
    return _figure(axes)


def scale(parts: Results) -> Figure:
    """Rate by workers with the ideal, and what Redis and the machine give for it."""
    rate, share = _axes(2)
    data = parts["scale"]
    fast = min(run["latency_s"] for run in data["fleets"])
    runs = [run for run in data["fleets"] if run["latency_s"] == fast]
    workers = sorted({run["workers"] for run in runs})

    def medians(figure: str) -> list[float]:
        return [statistics.median(run[figure] for run in runs if run["workers"] == n)
                for n in workers]  # fmt: skip

    rate.plot(workers, medians("ideal_per_s"), color=GREY, linestyle="--", label="ideal")
    rate.plot(workers, medians("per_s"), color=BLUE, marker="o", label="reached")
    rate.set(xlabel="workers of 256 slots, 200 ms", ylabel="requests/s", xscale="log", yscale="log")
    rate.set_yticks(medians("ideal_per_s"), [f"{ideal:,.0f}" for ideal in medians("ideal_per_s")])
    cores = data["machine"]["cores"]
    for figure, colour, label in (
        ("machine_share", ORANGE, f"all {cores} cores"),
        ("redis_share", GREEN, "Redis, of one core"),
    ):  # fmt: skip
        share.plot(workers, [100 * v for v in medians(figure)], color=colour, marker="o",
                   label=label)  # fmt: skip
    share.set(xlabel="workers of 256 slots, 200 ms", ylabel="CPU used, %", xscale="log",
              ylim=(0, 105))  # fmt: skip
    for axes in (rate, share):
        axes.set_xticks(workers, list(map(str, workers)))
        axes.minorticks_off()
        axes.legend()
    return _figure(rate)


def size(parts: Results) -> Figure:
    """Memory of every process over the large file."""
    processes, redis = _axes(2)
    phases = parts["size"]["phases"]
    for phase, process, colour, label in (
        ("submit", "producer", BLUE, "submit"), ("drain", "worker", ORANGE, "worker"),
        ("collect", "producer", GREEN, "results"),
    ):  # fmt: skip
        processes.plot(*_curve(phases[phase], process), color=colour, label=label)
        redis.plot(*_curve(phases[phase], "redis"), color=colour, label=label)
    redis.plot(*_curve(phases["window"], "redis"), color=GREY, linewidth=0.9,
               label="run, in windows")  # fmt: skip
    processes.set(ylabel="resident memory, MB")
    redis.set(ylabel="Redis' data, MB")
    for axes in (processes, redis):
        axes.set(xlabel="requests through this command", ylim=(0, None))
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(4))
        axes.xaxis.set_major_formatter(mpl.ticker.EngFormatter(sep=""))
        _thousands(axes.yaxis)
        axes.legend()
    return _figure(processes)


def _curve(phase: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Return memory by requests done, without the moments when a process was just starting."""
    pairs = zip(phase["trace"]["done"], phase["trace"][name], strict=True)
    done, mb = zip(*(pair for pair in pairs if pair[0] > 0), strict=True)
    return list(done), list(mb)


#: The H200 runs: label, what the queue is divided by, the runs of each machine.
PAIRS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("8B, 256 slots\nLLM.generate", "offline", ("gpu-8b",)),
    ("8B, 256 slots\nbare", "bare", ("gpu-8b", "gpu-8b-second-host")),
    ("8B, 1,024 slots\nbare, all at once", "all",
     ("gpu-8b-1024-slots", "gpu-8b-1024-slots-second-host")),
    ("1B, 256 slots\nbare", "bare", ("gpu-1b", "gpu-1b-second-host")),
)  # fmt: skip


def gpu(parts: Results) -> Figure:
    """Every pair of runs on the H200, a colour a machine: warmq over the engine alone."""
    (axes,) = _axes()
    for column, (_, other, names) in enumerate(PAIRS):
        pairs = [
            (ratio, colour)
            for name, colour in zip(names, (BLUE, GREEN), strict=False)
            for ratio in parts[name]["reached"][f"queue_to_{other}"]["values"]
        ]
        ratios = [ratio for ratio, _ in pairs]
        middle = (len(ratios) - 1) / 2
        places = [column + 0.25 * (n - middle) / max(1, middle) for n in range(len(ratios))]
        axes.scatter(places, ratios, color=[colour for _, colour in pairs], s=14)
        median = statistics.median(ratios)
        axes.hlines(median, column - 0.32, column + 0.32, color=ORANGE)
        axes.annotate(f"median {median:.4f}", (column, 1), xycoords=("data", "axes fraction"),
                      ha="center", va="top")  # fmt: skip
    axes.axhline(1, color=GREY, linestyle="--", linewidth=0.8)
    axes.margins(y=0.15)
    axes.set(ylabel="tokens/s: warmq ÷ engine alone", xlim=(-0.5, len(PAIRS) - 0.5))
    axes.set_xticks(range(len(PAIRS)), [label for label, _, _ in PAIRS])
    return _figure(axes)


#: The tutorial's ways, as they stand on the axis.
WAYS = {
    "one": "one by one", "warmq": "warmq", "ngram": "n-gram", "draft": "draft model",
    "tp2": "tensor\nparallel 2", "pp2": "pipeline 2",
}  # fmt: skip


def qa(parts: Results) -> Figure:
    """Time for the questions ÷ that of warmq alone, in each place, beside the tutorial's."""
    (axes,) = _axes()
    here, there = parts["qa"], parts["qa-8b-two-gpus"]
    minutes = here["tutorial_minutes"]
    series = {
        "tutorial (2 GPUs, vLLM of 2024)": {n: m / minutes["warmq"] for n, m in minutes.items()},
        "H200s, 8B shape": _ratios(there),
        "this CPU, tiny model": _ratios(here),
    }
    for number, ((label, ratios), colour) in enumerate(
        zip(series.items(), (GREY, GREEN, BLUE), strict=True)
    ):
        places = [list(WAYS).index(name) + 0.27 * (number - 1) for name in ratios]
        bars = axes.bar(places, list(ratios.values()), width=0.25, color=colour, label=label)
        axes.bar_label(bars, fmt="{:.2g}", padding=2, color=GREY, fontsize=8)
    axes.axhline(1, color=GREY, linestyle="--", linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:g}"))
    axes.margins(y=0.12)
    axes.set_ylabel("time ÷ warmq's, less is better")
    axes.set_xticks(range(len(WAYS)), list(WAYS.values()))
    axes.legend(loc="upper right")
    return _figure(axes)


def _ratios(found: dict[str, Any]) -> dict[str, float]:
    return {name: way["to_warmq"] for name, way in found["ways"].items() if "to_warmq" in way}


#: Each plot: its name, how it is drawn, the results it needs, what it shows.
PLOTS: tuple[tuple[str, Callable[[Results], Figure], tuple[str, ...], str], ...] = (
    ("gpu", gpu, tuple(dict.fromkeys(name for _, _, names in PAIRS for name in names)),
     "Tokens/s on an H200, warmq ÷ the engine alone: every pair of runs (a colour a machine), and "
     "the medians"),
    ("alternatives", alternatives, ("alternatives",),
     "Tokens/s of warmq and of what a user would pick instead, same vLLM and file"),
    ("occupancy", occupancy, ("queues",), "Share of slots full under a backlog, by slots"),
    ("scale", scale, ("scale",), "Requests/s by workers, and the CPU they take"),
    ("qa", qa, ("qa", "qa-8b-two-gpus"),
     "The tutorial's experiment: time of each way ÷ warmq's, here and in the tutorial"),
    ("size", size, ("size",), "Memory of all processes over a million lines"),
)  # fmt: skip


def write(folder: Path = FOLDER) -> list[tuple[str, str]]:
    """Draw what there are results for; return each file's name and what it shows."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw, needed, text in PLOTS:
        parts = {part: found for part in needed if (found := report.load(part)) is not None}
        if len(parts) == len(needed):
            save(draw, parts, folder / f"{name}.svg")
            written.append((f"{name}.svg", text))
    return written


def save(draw: Callable[[Results], Figure], parts: Results, path: Path) -> None:
    """Draw one plot; the same results give the same bytes."""
    with mpl.rc_context(STYLE):
        draw(parts).savefig(path, transparent=True, metadata={"Date": None})
