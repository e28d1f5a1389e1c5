"""The release before this one, as its users have it: a wheel in an environment of its own.

The wheel lies in tests/releases, so that neither the clone's history nor a network is needed;
`git archive` of its commit, then `python -m hatchling build -t wheel`, builds the same files.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from kit.stacks.installed import environment_with

from contract.redis import keys
from demo.stack import ROOT, Worker, environment_of

#: Built from the commit 643d6d1. Its gateway needs ijson besides, which this environment has not;
#: its workers and the other commands do not.
WHEEL = ROOT / "tests" / "releases" / "warmq-0.2.0-py3-none-any.whl"


def worker_keys(client: redis.Redis) -> list[bytes]:
    """Return the hashes of leases that workers of either release hold."""
    found: list[bytes] = client.keys(keys.worker_key("*"))
    return found


class PreviousWorker(Worker):
    """A worker of the previous release, started as its Procfile says."""

    def command(self) -> list[str]:
        """Return the command that it documents."""
        program = str(Path(self.python).parent / "celery")
        return [program, *"-A worker.app worker --pool=solo --without-gossip "
                "--without-mingle --loglevel=INFO".split()]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Previous:
    """The previous release: its interpreter, and an empty folder to run it in."""

    python: Path
    folder: Path

    def worker(self, redis_url: str, log_path: Path, **settings: object) -> PreviousWorker:
        """Return a worker that has yet to be started."""
        env = {"PYTHONPATH": ""}
        worker = PreviousWorker(redis_url, log_path, root=self.folder, env=env, **settings)
        worker.python = self.python
        return worker

    def producer(
        self, *args: str | Path, redis_url: str, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run its `producer` to its end."""
        return subprocess.run(
            self.command(*args), env=self.env(redis_url), cwd=self.folder, text=True,
            capture_output=True, timeout=50, check=False, **options,
        )  # fmt: skip

    def command(self, *args: str | Path) -> Sequence[str]:
        """Return the argv of its `producer`."""
        return [str(self.python.parent / "producer"), *map(str, args)]

    @staticmethod
    def env(redis_url: str) -> Mapping[str, str]:
        """Return the environment of a command, without a way to the checkout."""
        return environment_of({"redis_url": redis_url}) | {"PYTHONPATH": ""}


def previous_release(folder: Path) -> Previous:
    """Install the previous release into `folder`."""
    empty = folder / "empty"
    empty.mkdir(parents=True)
    return Previous(environment_with(WHEEL, folder / "venv"), empty)
