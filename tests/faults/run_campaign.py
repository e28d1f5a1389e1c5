"""The long fault campaigns; `make faults-full` runs them all.

`run_campaign.py [--real, --front-ends, --swaps, --swaps --real or --sleeps] [--seed N]`
`python tests/faults/run_campaign.py --without NX`: workers that lack this guard of the promise.
Then the campaign must fail, and does not pass if it does not.
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

from kit.campaigns.campaign import Campaign  # noqa: E402
from kit.campaigns.campaign_real import RealCampaign, SharedCampaign  # noqa: E402
from kit.campaigns.mutations import GUARDS, BrokenPromise, root_with  # noqa: E402
from kit.campaigns.swap_campaign import SleepCampaign, SwapCampaign  # noqa: E402
from kit.campaigns.swap_campaign_real import RealSwapCampaign  # noqa: E402
from kit.redis_servers.wrong_clock import steppable_clock  # noqa: E402
from kit.stacks.stage import Stage, stage  # noqa: E402

RESULTS = HERE / "results"
MUTATIONS = RESULTS / "campaign-mutations.json"


def main() -> int:
    """Run one campaign and print its report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--real", action="store_true", help="with vLLM, not the simulated engine")
    parser.add_argument(
        "--front-ends", action="store_true", help="with vLLM and two front ends a worker"
    )
    parser.add_argument(
        "--swaps",
        action="store_true",
        help="with five models, each fault in a phase of a swap; with --real three",
    )
    parser.add_argument("--sleeps", action="store_true", help="the same, and engines sleep")
    parser.add_argument("--without", choices=GUARDS, help="take this guard out of the workers")
    parser.add_argument("--faults", type=int, help="default 200; 40 with vLLM, 20 of swaps")
    parser.add_argument("--requests", type=int, help="default 20000; 1000 with vLLM")
    parser.add_argument("--save", action="store_true", help="write tests/faults/results/*.json")
    options = parser.parse_args()
    sys.stderr.write(f"seed {options.seed}\n")
    folder = Path(tempfile.mkdtemp(prefix="warmq-campaign-"))
    with stage(folder, "--appendfsync", "always", clock=steppable_clock(str(folder))) as on:
        try:
            status = mutated(on, options) if options.without else whole(on, options)
        except BaseException:
            (folder / "redis.txt").write_text(on.picture())
            sys.stderr.write(f"logs, Redis' file and what it held are in {folder}\n")
            raise
    if status:
        sys.stderr.write(f"logs and Redis' file are in {folder}\n")
    else:
        shutil.rmtree(folder)
    return status


def whole(on: Stage, options: argparse.Namespace) -> int:
    """Run the campaign with the code as it is; it raises where the promise breaks."""
    kind, faults, requests = Campaign, 200, 20_000
    if options.real or options.front_ends:
        kind, faults, requests = RealCampaign, 40, 1000
    if options.front_ends:
        kind = SharedCampaign
    if options.swaps or options.sleeps:
        kind, requests = SleepCampaign if options.sleeps else SwapCampaign, 0
    if options.swaps and options.real:
        kind, faults = RealSwapCampaign, 20
    campaign = kind(on, options.seed, options.faults or faults, options.requests or requests)
    try:
        report = campaign.run()
    finally:
        sys.stdout.write(campaign.report.text() + "\n")
    if options.save:
        (RESULTS / f"campaign-{report.engine}.json").write_text(report.text() + "\n")
    if broken := report.broken():
        sys.stderr.write(f"broken: {broken}\n")
        return 1
    return 0


def mutated(on: Stage, options: argparse.Namespace) -> int:
    """Run it with workers that lack a guard until an observer objects; 1 if none does."""
    root = root_with(on.folder, GUARDS[options.without])
    campaign = Campaign(on, options.seed, options.faults or 200, options.requests or 0, root)
    try:
        campaign.run(look_after_each=True)
    except BrokenPromise as seen:
        sys.stdout.write(f"without {options.without}: {seen}\n")
        if options.save:
            known = json.loads(MUTATIONS.read_text()) if MUTATIONS.exists() else {}
            known[options.without] = {"seed": options.seed, "seen": str(seen)}
            MUTATIONS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
        return 0
    sys.stdout.write(f"without {options.without} nobody noticed anything\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
