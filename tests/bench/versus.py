"""Is the working tree as fast as another revision? Both take turns on this machine.

    versus.py REV [--pairs 5] [--parts n256,ceiling,openai,submit,results] [--name versus]

REV is checked out into a temporary git worktree. PYTHONPATH says whose worker and producer run;
what starts and times them, and the Redis, are the same for both. All figures come from command
lines and worker processes, so that the two may differ in all that lies between. Pairs run in the
order A B, B A, A B, ... The figures go to results/NAME.json.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.common import report
from bench.revisions.versus_parts import PARTS, Side

from demo.stack import ROOT

#: Of these less is better; of all others more.
LESS_IS_BETTER = {"worker_us_per_request"}
#: A pair's figures: those of REV and those of the working tree.
Pair = tuple[dict[str, float], dict[str, float]]


def git(*words: str) -> str:
    """Run git in this repository; return what it prints."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


@contextmanager
def checked_out(rev: str) -> Iterator[Path]:
    """Yield the root of a git worktree of a revision, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="warmq-versus-") as name:
        root = Path(name) / "rev"
        git("worktree", "add", "--quiet", "--detach", str(root), rev)
        try:
            yield root
        finally:
            git("worktree", "remove", "--force", str(root))


def turns(sides: Sequence[Side], pairs: int) -> Iterator[Sequence[Side]]:
    """Yield the order of each pair: every other one begins with the second side."""
    for pair in range(pairs):
        yield sides if pair % 2 == 0 else sides[::-1]


def measure(part: str, sides: Sequence[Side], pairs: int) -> list[Pair]:
    """Run one part on both sides, in turn."""
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="warmq-bench-") as name,
        PARTS[part](Path(name), sides) as run,
    ):
        for order in turns(sides, pairs):
            pair = {side: run(side) for side in order}
            found.append((pair[sides[0]], pair[sides[1]]))
            print(part, *found[-1], flush=True)
    return found


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return, for each figure, both sides' spreads and that of working tree ÷ REV by pair."""
    return {
        figure: {
            "rev": report.spread([rev[figure] for rev, _ in pairs], 1),
            "tree": report.spread([tree[figure] for _, tree in pairs], 1),
            "ratio": report.spread([tree[figure] / rev[figure] for rev, tree in pairs], 3),
        }
        for figure in pairs[0][0]
    }


def show(rev: str, parts: dict[str, dict[str, Any]]) -> None:
    """Print a row for each figure."""
    report.table(
        f"the working tree beside {rev}, medians",
        ("part", "figure", "better", rev[:7], "tree", "tree ÷ rev by pair", "median (range)"),
        [
            (
                part,
                figure,
                "less" if figure in LESS_IS_BETTER else "more",
                *(f"{found[side]['median']:,.1f}" for side in ("rev", "tree")),
                " ".join(f"{ratio:.3f}" for ratio in found["ratio"]["values"]),
                report.shown(found["ratio"]),
            )
            for part, figures in parts.items()
            for figure, found in figures["figures"].items()
        ],
    )


def main() -> int:
    """Parse the command line, run, print and save."""
    parser = argparse.ArgumentParser(description="measure the working tree beside a revision")
    parser.add_argument("rev", help="a commit that git knows")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas between")
    parser.add_argument("--name", default="versus", help="of the file of figures")
    chosen = parser.parse_args()
    parts = chosen.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(PARTS)}")
    try:
        rev = git("rev-parse", "--verify", "--short=12", f"{chosen.rev}^{{commit}}")
    except subprocess.CalledProcessError as error:
        parser.error(f"{chosen.rev}: {error.stderr.strip()}")
    # Stopped by a signal too, the worktree is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    found: dict[str, dict[str, Any]] = {}
    with checked_out(rev) as root:
        sides = (Side(rev, root), Side("working tree", ROOT))
        for side in sides:
            side.prepare()
        for part in parts:
            loads = [report.load_now()]
            figures = summary(measure(part, sides, chosen.pairs))
            found[part] = {"load_average": [*loads, report.load_now()], "figures": figures}
    report.save(chosen.name, {"rev": rev, "pairs": chosen.pairs, "parts": found})
    show(rev, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
