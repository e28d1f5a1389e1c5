"""Pre-flight: `python -m worker.check` says what a worker with these settings will do.

A table, then every problem with its remedy; nothing of an engine is imported or started.
Exit status: 0 nothing in the way, 1 something is, 2 the settings themselves are wrong.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing

from contract.errors import StoreUnavailable
from contract.redis.batches import BatchStore
from contract.redis.connect import masked
from contract.settings import SettingsError
from worker.engine.catalogue import find_engine, load_settings
from worker.engine.spec import Preflight, answers
from worker.machine import node_memory
from worker.machine.finding import Finding
from worker.settings import WorkerSettings
from worker.tools.command import problem_lines


def look(settings: WorkerSettings) -> Preflight:
    """Ask the engine's own pre-flight, and look at what all engines need."""
    seen = find_engine(settings.engine).check(settings)
    seen.rows.setdefault("answers", answers(settings.default_max_tokens))
    seen.rows.setdefault("memory", f"{node_memory.machine().free / 2**30:.1f} GiB free")
    _look_at_redis(settings, seen)
    return seen


def _look_at_redis(settings: WorkerSettings, seen: Preflight) -> None:
    url, queue = settings.redis_url.get_secret_value(), settings.queue_to_drain
    try:
        with closing(BatchStore.open(url, "check", ttl_ms=settings.result_ttl_ms)) as store:
            waiting = sum(store.queue_lengths(queue).values())
            workers = len(store.workers(queue))
        seen.rows["queue"] = f"{queue}: {waiting} waiting, {workers} other workers"
        seen.rows["Redis"] = masked(url)
    except StoreUnavailable as error:
        seen.rows["Redis"] = masked(url) + ": unreachable"
        seen.found.append(Finding(str(error), "Start Redis, or set WARMQ_REDIS_URL"))


def report(rows: Mapping[str, str], found: Sequence[Finding]) -> str:
    """Return table and problems as text."""
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    lines += (f"\n{problem}" for problem in problem_lines(found))
    if not any(f.fatal for f in found):
        lines += ["", "Nothing in the way."]
    return "\n".join(lines)


def main() -> int:
    """Check the environment's settings; return the exit status."""
    try:
        seen = look(load_settings())
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(report(seen.rows, seen.found) + "\n")
    return 1 if any(f.fatal for f in seen.found) else 0
