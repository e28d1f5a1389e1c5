"""`make upgrade-full`: 20,000 requests over workers and producers of two releases.

`python tests/faults/run_upgrade.py [--seed N] [--faults 40] [--requests 20000] [--save]`
The short form is test_upgrade_drill.py.
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
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

from kit.stacks.previous import WHEEL, previous_release  # noqa: E402
from kit.stacks.stage import stage  # noqa: E402
from kit.stacks.upgrade_drill import UpgradeDrill  # noqa: E402

from contract.version import PROTOCOL  # noqa: E402

RESULT = HERE / "results" / "upgrade.json"


def main() -> int:
    """Run one drill and print its report; it raises where the promise breaks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    sys.stderr.write(f"seed {options.seed}\n")
    folder = Path(tempfile.mkdtemp(prefix="warmq-upgrade-"))
    (folder / "previous").mkdir()
    previous = previous_release(folder / "previous")
    with stage(folder, "--appendfsync", "always") as on:
        drill = UpgradeDrill(on, previous, options.seed, options.requests, options.faults)
        try:
            report = drill.run()
        except BaseException:
            (folder / "redis.txt").write_text(on.picture())
            sys.stderr.write(f"{drill.report.text()}\nlogs and what Redis held: {folder}\n")
            raise
    sys.stdout.write(report.text() + "\n")
    if options.save:
        found = {"previous": WHEEL.name, "protocol": PROTOCOL} | json.loads(report.text())
        RESULT.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
