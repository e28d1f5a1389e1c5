"""`make models-day-full`: a simulated day of sixteen workers and twelve models.

    run_models_day.py [--swaps 1,30,120] [--hours 24] [--seed 1] [--save]

For each cost of a swap in seconds: the policy beside the best static placement, and beside a swap
for each arrival. --save writes results/models-day.json. It ends with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

from kit.drain.fleet_simulation import Figures, compared  # noqa: E402

RESULT = HERE / "results" / "models-day.json"


def missed(figures: dict[str, Figures]) -> list[str]:
    """Return the bars that the policy misses."""
    own, static = figures["backlog"], figures["static"]
    bars = {
        "p95 of waiting at most half of static placement": own.p95_s <= 0.5 * static.p95_s,
        "at most 5 % of the time lost to swaps": own.lost <= 0.05,
    }
    return [bar for bar, kept in bars.items() if not kept]


def main() -> int:
    """Parse the command line, run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swaps", default="1,30,120")
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    found, broken = {}, []
    for swap_s in map(int, chosen.swaps.split(",")):
        figures = compared(swap_s, chosen.hours, chosen.seed)
        found[f"a swap takes {swap_s} s"] = {
            name: {k: round(v, 4) for k, v in each._asdict().items()}
            for name, each in figures.items()
        }
        broken += [f"{swap_s} s: {bar}" for bar in missed(figures)]
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if chosen.save:
        day = {"workers": 16, "models": 12, "hours": chosen.hours, "seed": chosen.seed}
        RESULT.write_text(json.dumps(day | found, indent=1) + "\n")
    sys.stdout.write("\n".join(["missed:", *broken]) + "\n" if broken else "no bar is missed\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
