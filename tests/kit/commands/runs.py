"""`producer run` as tests start, stop and read it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.commands.support import finish, producer_command, producer_env, run_all
from kit.protocol.lessee import Lessee, client_of

from contract.batch import Batch
from contract.redis.batches import BatchStore
from demo.stack import eventually

_WINDOW = re.compile(r"warmq:batch:(run_[0-9a-f]{16}\.\d+)")


@contextmanager
def running(redis_url: str, *args: str | Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Start the real command."""
    with subprocess.Popen(
        producer_command("run", *args), env=producer_env(redis_url, **env), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def windows(store: BatchStore) -> list[Batch]:
    """Return the windows of runs that Redis has, the newest first; lists show only the run."""
    names = (key.decode() for key in client_of(store).scan_iter("warmq:batch:run_*.*"))
    ids = {found[1] for name in names if (found := _WINDOW.fullmatch(name))}
    newest = sorted(ids, key=lambda one: -int(one.rpartition(".")[2]))
    return [batch for batch in map(store.batch, newest) if batch is not None]


def run_of(store: BatchStore) -> str:
    """Return the name of the run that began last."""
    return next(one for one in store.newest_ids() if one.startswith("run_"))


def journal_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.progress")


def done_windows(out: Path) -> int:
    """Return how many windows the journal says are in the output."""
    windows: int = json.loads(journal_of(out).read_text())["windows"]
    return windows


def custom_ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def stopped_after_one_window(
    redis_url: str, store: BatchStore, source: Path, out: Path, *args: str | Path
) -> None:
    """Run a file of more than 1,000 lines in windows of 500 until one is in the output."""
    with running(redis_url, source, out, "--window", "500", *args) as process:
        eventually(lambda: len(windows(store)) == 2, 20)
        lessee = Lessee(client_of(store))
        finish(lessee, lessee.pop(500))
        eventually(lambda: done_windows(out) == 1, 20)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def served(
    redis_url: str, store: BatchStore, *args: str | Path, text: str = "", **env: str
) -> tuple[int, str]:
    """Run the command with somebody who answers all requests; return its status and stderr.

    `text` is what each answer says besides its custom_id.
    """
    with running(redis_url, *args, **env) as process:

        def ended() -> bool:
            run_all(store, text=text)
            return process.poll() is not None

        eventually(ended, 60)
        assert process.stderr is not None
        return process.returncode, process.stderr.read()
