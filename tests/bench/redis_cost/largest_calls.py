"""How long one call of a script holds Redis at most, over each amount of `large_amounts`.

    largest_calls.py [--save] [--only WORDS]

Redis' own SLOWLOG tells how long each call took: what the network and this program take does not
count, what else runs on the machine does. With --save the figures are kept in
tests/bench/results/largest_calls.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench.redis_cost.redis_times import LOGGED, SLOW_US, scripts  # noqa: E402
from kit.protocol.large_amounts import AMOUNTS, Amount  # noqa: E402

from contract.redis.batches import BatchStore  # noqa: E402
from demo.stack import RedisServer  # noqa: E402

RESULTS = ROOT / "tests" / "bench" / "results" / "largest_calls.json"
#: No call may take longer, in ms.
MOST_MS = 50


def longest(amount: Amount) -> dict[str, object]:
    """Return the slowest call over an amount, and how many there were, in a Redis of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder), "--appendonly", "no", "--save", "") as server,
        server.client() as client,
    ):
        ask = amount.fill(BatchStore(client, ttl_ms=3_600_000), client, amount.count)
        # What a script calls is logged, too: with all of it the log itself would take time.
        client.config_set("slowlog-log-slower-than", SLOW_US)
        client.config_set("slowlog-max-len", LOGGED)
        client.slowlog_reset()
        client.config_resetstat()
        ask()
        calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        slow = [
            (entry["duration"] / 1000, entry["command"].split()[1].decode())
            for entry in client.slowlog_get(LOGGED)
            if entry["command"].startswith(b"EVALSHA")
        ]
    slowest_ms, sha = max(slow, default=(SLOW_US / 1000, ""))
    return {
        "what": amount.what, "count": amount.count, "script": scripts().get(sha, sha),
        "calls": calls, "slowest_ms": slowest_ms,
    }  # fmt: skip


def main() -> None:
    """Measure, print a line for each amount; fail where a call took longer than it may."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--save", action="store_true")
    options.add_argument("--only", default="", metavar="WORDS")
    chosen = options.parse_args()
    rows = []
    for amount in AMOUNTS:
        if chosen.only in amount.what:
            rows.append(longest(amount))
            print(rows[-1], flush=True)
    if chosen.save:
        head = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "most_ms": MOST_MS}
        RESULTS.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    late = [row["what"] for row in rows if float(str(row["slowest_ms"])) > MOST_MS]
    assert not late, late


if __name__ == "__main__":
    main()
