"""`make bad-days-full`: days of a bad server before 100,000 lines each, on a simulated clock.

    run_bad_days.py [--seeds 10] [--first 0] [--lines 100000] [--save]

Each day's figures are printed as it ends; --save keeps them in results/bad-days.json. It ends with
1 if a day misses a bar.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

import pytest  # noqa: E402
from kit.servers.bad_day import TRIES_A_LINE, BadDay  # noqa: E402

RESULT = HERE / "results" / "bad-days.json"


def a_day(seed: int, lines: int) -> dict[str, Any]:
    """Run one day; return its figures."""
    began = time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        found = BadDay(seed, lines).run(patch)
    return {"seed": seed, **found, "cpu_s": round(time.process_time() - began)}


def missed(day: dict[str, Any]) -> list[str]:
    """Return the bars that a day misses."""
    bars = {
        "every line is answered, but those at fault": day["answered"] + day["at_fault"]
        == day["lines"],
        "no line fails that is not at fault": day["lost"] == 0,
        "no death is counted": day["deaths"] == 0,
        f"at most {TRIES_A_LINE} tries a line": day["tries_a_line"] <= TRIES_A_LINE,
    }
    return [bar for bar, kept in bars.items() if not kept]


def main() -> int:
    """Parse the command line, run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)  # each rest is one
    days = []
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        days.append(a_day(seed, chosen.lines))
        sys.stdout.write(" ".join([json.dumps(days[-1]), *missed(days[-1])]) + "\n")
        sys.stdout.flush()
    if chosen.save:
        found = {"most_tries_a_line": TRIES_A_LINE, "days": days}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(map(missed, days)) else 0


if __name__ == "__main__":
    sys.exit(main())
