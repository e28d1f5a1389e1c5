"""The long campaign against gateways; `make faults-gateway-full` runs it.

`python tests/faults/run_gateway.py [--seed N] [--kills 40] [--redis-kills 5] [--lines 6000]`
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

from kit.campaigns.gateway_campaign import GatewayCampaign  # noqa: E402
from kit.campaigns.gateway_phases import PHASES  # noqa: E402
from kit.campaigns.gateway_verdict import judge  # noqa: E402

RESULTS = HERE / "results" / "campaign-gateway.json"


def main() -> int:
    """Run it, print its report, and say whether the promise was kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--kills", type=int, default=40, help="of gateways and carriers")
    parser.add_argument("--redis-kills", type=int, default=5)
    parser.add_argument("--lines", type=int, default=6000, help="of the largest batches")
    parser.add_argument("--save", action="store_true", help=f"add it to {RESULTS.name}")
    options = parser.parse_args()
    sys.stderr.write(f"seed {options.seed}\n")
    folder = Path(tempfile.mkdtemp(prefix="warmq-gateway-campaign-"))
    campaign = GatewayCampaign(
        folder, options.seed, options.kills, options.redis_kills, options.lines
    )
    try:
        report = campaign.run(judge)
    except BaseException:
        sys.stderr.write(f"logs and Redis' file are in {folder}\n")
        raise
    finally:
        sys.stdout.write(campaign.report.text() + "\n")
    broken = report.broken() | {f"no kill at {p}": 0 for p in PHASES if not report.phases[p]}
    if broken:
        sys.stderr.write(f"broken: {broken}; logs and Redis' file are in {folder}\n")
        return 1
    if options.save:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        RESULTS.write_text(json.dumps([*known, json.loads(report.text())], indent=2) + "\n")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
