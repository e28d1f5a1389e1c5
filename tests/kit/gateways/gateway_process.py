"""A real gateway process: `producer serve` on a free port, with a Redis and a folder of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from demo.stack import ROOT, environment_of
from gateway.http.connections import OTHER_DESCRIPTORS, REFUSED_ABOVE_LIMIT


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stored(folder: Path) -> list[str]:
    """Return the names in the store of `folder/files`, without the mark by which it is known."""
    from gateway.files.files import MARK

    names = sorted(path.name for path in (folder / "files").iterdir())
    return [name for name in names if not name.startswith(MARK)]


class GatewayProcess:
    """`producer serve`; its log is in `folder/gateway-<port>.log`, its files in `folder/files`."""

    def __init__(
        self,
        redis_url: str,
        folder: Path,
        root: Path = ROOT,
        descriptors: int | None = None,
        **settings: object,
    ) -> None:
        """Prepare; `root` has the packages, `descriptors` is the process' limit of open files."""
        self._root, self._descriptors = root, descriptors
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = folder / f"gateway-{self.port}.log"
        given = {"redis_url": redis_url, "gateway_store": folder / "files"} | settings
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._env = environment_of(given) | {"PYTHONPATH": path}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> GatewayProcess:
        """Start it, and wait until it answers.

        Raises:
            RuntimeError: with its log, if it ends or does not answer within 30 s.
        """
        command = [sys.executable, "-m", "producer", "serve", "--port", str(self.port)]
        if self._descriptors is not None:
            command = ["prlimit", f"--nofile={self._descriptors}", *command]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=self._env,
                stdout=log,
                stderr=log,
                cwd=self._root,
            )
        until = time.monotonic() + 30
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1):
                    return self
            except OSError:
                time.sleep(0.05)  # not a synchronisation: it is asked again until it answers
        log_text = self.log_path.read_text(errors="replace")
        self.kill()
        raise RuntimeError(f"the gateway did not start:\n{log_text[-4000:]}")

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        """SIGTERM; return the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(20)

    def __enter__(self) -> GatewayProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


def few(connections: int) -> int:
    """Return the descriptors of a gateway that has no room for more connections."""
    return connections + REFUSED_ABOVE_LIMIT + OTHER_DESCRIPTORS
