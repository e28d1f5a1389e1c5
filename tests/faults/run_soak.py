"""An hour of ten tenants, one of them hostile; `make faults-full` runs it.

`python tests/faults/run_soak.py [--minutes 60] [--seed N] [--save]`
A sixth of the time the nine are alone. The short form is test_soak.py.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent / "kit")]

from attacked import attacked  # noqa: E402
from soak import Soak  # noqa: E402

RESULT = HERE / "results" / "soak.json"


def main() -> int:
    """Run it, print its report, and say whether each bar held."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    sys.stderr.write(f"seed {options.seed}\n")
    folder = Path(tempfile.mkdtemp(prefix="warmq-soak-"))
    with attacked(folder) as on:
        seconds = options.minutes * 60
        soak = Soak(on, options.seed, options.minutes)
        try:
            report = soak.run(seconds / 6, seconds * 5 / 6)
        except BaseException:
            sys.stderr.write(f"logs are in {folder}\n")
            raise
        finally:
            sys.stdout.write(soak.report.text() + "\n")
    if broken := report.broken():
        sys.stderr.write(f"broken: {broken}; logs are in {folder}\n")
        return 1
    if options.save:
        RESULT.write_text(json.dumps(json.loads(report.text()), indent=2) + "\n")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
