"""Ten tenants for an hour, one of them hostile; `make faults-full` runs it.

`python tests/faults/run_soak.py [--minutes 60] [--seed N] [--save]`
`python tests/faults/run_soak.py --alone 60 --hostile 240 --heavy 120 --json soak.json`
A sixth of the minutes the nine are alone, another sixth the tenth is honest and heavy.
It needs neither git nor a virtual environment: packages may come by PYTHONPATH, and redis-server
by PATH. What is known is printed, and written, as soon as a part has ended.
The short form is test_soak.py.
"""

from __future__ import annotations

import argparse
import functools
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

from kit.hostile.attacked import attacked, tiny  # noqa: E402
from kit.hostile.soak import Soak  # noqa: E402

RESULT = HERE / "results" / "soak.json"


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    for part in ("alone", "hostile", "heavy"):
        parser.add_argument(f"--{part}", type=float, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report there")
    parser.add_argument("--engine-args", help="instead of those for this device")
    parser.add_argument("--logs", type=Path, help="a folder for logs, which are kept then")
    return parser.parse_args()


def main() -> int:
    """Run it, print its report, and say whether each bar held."""
    given = options()
    sys.stderr.write(f"seed {given.seed}\n")
    seconds = given.minutes * 60
    lengths = [
        share if asked is None else asked
        for asked, share in ((given.alone, seconds / 6), (given.hostile, seconds * 4 / 6),
                             (given.heavy, seconds / 6))
    ]  # fmt: skip
    folder = given.logs or Path(tempfile.mkdtemp(prefix="warmq-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [path for path in (given.json, RESULT if given.save else None) if path]
    with attacked(folder, functools.partial(tiny, engine_args=given.engine_args)) as on:
        sys.stderr.write(f"ready; a small chat alone takes {on.alone_s:.3f} s\n")

        def said(part: str) -> None:
            sys.stdout.write(f"{part}: {soak.report.parts[part].line()}\n")
            sys.stdout.flush()
            for path in paths:
                path.write_text(soak.report.text() + "\n")

        soak = Soak(on, given.seed, said)
        try:
            report = soak.run(*lengths)
        except BaseException:
            sys.stderr.write(f"logs are in {folder}\n")
            raise
    if not paths:
        sys.stdout.write(report.text() + "\n")
    if broken := report.broken():
        sys.stderr.write(f"broken: {broken}; logs are in {folder}\n")
        return 1
    if not given.logs:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
