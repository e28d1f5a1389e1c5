"""`python tests/faults/run_campaign.py --faults 200 --requests 20000 [--seed N] [--save]`."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

from campaign import Campaign  # noqa: E402
from campaign_real import RealCampaign  # noqa: E402
from stage import stage  # noqa: E402


def main() -> int:
    """Run one campaign and print its report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--real", action="store_true", help="with vLLM, not the simulated engine")
    parser.add_argument("--faults", type=int, help="default 200; 20 with vLLM")
    parser.add_argument("--requests", type=int, help="default 20000; 500 with vLLM")
    parser.add_argument("--save", action="store_true", help="write tests/faults/results/*.json")
    options = parser.parse_args()
    sys.stderr.write(f"seed {options.seed}\n")
    with (
        tempfile.TemporaryDirectory() as folder,
        stage(Path(folder), "--appendfsync", "always") as on,
    ):
        kind, faults, requests = (
            (RealCampaign, 20, 500) if options.real else (Campaign, 200, 20_000)
        )
        report = kind(
            on, options.seed, options.faults or faults, options.requests or requests
        ).run()
    sys.stdout.write(report.text() + "\n")
    if options.save:
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / f"campaign-{report.engine}.json").write_text(report.text() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
