"""The distribution's RabbitMQ, unpacked without root, for the queue that llmq wants."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from bench.peers.overlay import ENVIRONMENTS, CannotRun

from demo.stack import eventually, free_port

HOME = ENVIRONMENTS / "rabbitmq"


def _unpacked() -> Path:
    """Return the root below which RabbitMQ and Erlang are unpacked."""
    root, stamp = HOME / "root", HOME / "unpacked"
    if stamp.exists():
        return root
    shutil.rmtree(HOME, ignore_errors=True)
    (HOME / "deb").mkdir(parents=True)
    try:
        depends = _run(
            "apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests",
            "--no-conflicts", "--no-breaks", "--no-replaces", "--no-enhances", "rabbitmq-server",
        )  # fmt: skip
        erlang = sorted(set(re.findall(r"^erlang-\S+", depends, re.MULTILINE)))
        _run("apt-get", "download", "rabbitmq-server", *erlang, cwd=HOME / "deb")
        for package in (HOME / "deb").glob("*.deb"):
            _run("dpkg", "-x", package, root)
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        raise CannotRun(
            f"RabbitMQ cannot be unpacked (apt-get download, dpkg -x): {told}"
        ) from error
    launcher = root / "usr/lib/erlang/bin/erl"
    text = launcher.read_text()
    launcher.write_text(text.replace("=/usr/lib/erlang", f"={root}/usr/lib/erlang"))
    stamp.touch()
    return root


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=True
    ).stdout


class RabbitServer:
    """A private RabbitMQ on the loopback interface; its files go to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start Erlang's name server and RabbitMQ; return when it has started."""
        root = _unpacked()
        self._folder.mkdir(parents=True, exist_ok=True)
        programs = root / "usr/lib/erlang/bin"
        env = {
            "HOME": str(self._folder), "LANG": "C.UTF-8", "PATH": f"{programs}:/usr/bin:/bin",
            "RABBITMQ_MNESIA_BASE": str(self._folder), "RABBITMQ_LOG_BASE": str(self._folder),
            "RABBITMQ_NODENAME": "bench@localhost", "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port), "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._folder / "plugins"),
            "ERL_EPMD_PORT": str(free_port()), "ERL_EPMD_ADDRESS": "127.0.0.1",
        }  # fmt: skip
        (sbin,) = root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin")
        log = self._folder / "rabbit.log"
        # The name server apart: one that Erlang starts by itself outlives it.
        for command in ([programs / "epmd"], [sbin / "rabbitmq-server"]):
            with log.open("ab") as file:
                self._processes.append(subprocess.Popen(
                    command, env=env, stdout=file, stderr=file, start_new_session=True
                ))  # fmt: skip
        eventually(lambda: b"completed with" in log.read_bytes(), 60, f"RabbitMQ starts: {log}")

    def stop(self) -> None:
        """End both with what they started."""
        for process in reversed(self._processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
