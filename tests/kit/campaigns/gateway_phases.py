"""What a gateway is at, as the kernel knows it: its open files and connections."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from kit.gateways.gateway_process import GatewayProcess

#: What a gateway's own process may be at, and what the one that carries.
OF_GATEWAY, OF_CARRIER = ("upload", "webhook", "online"), ("looking", "submitting", "writing")
PHASES = (*OF_GATEWAY, *OF_CARRIER, "waiting")


def carriers(gateway: GatewayProcess) -> list[int]:
    """Return the process ids of a gateway's carriers."""
    if gateway.process is None:
        return []
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{gateway.process.pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _open(pid: int) -> Iterator[str]:
    """Yield what a process has open."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 - looked at every few milliseconds
            with suppress(OSError):
                yield os.readlink(f"{folder}/{name}")  # noqa: PTH115 - the same


def _connections_to(port: int) -> set[str]:
    """Return the sockets of this machine that are connected to a port, as links name them."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {f"socket:[{row[9]}]" for row in rows if row[2].endswith(f":{port:04X}")}


def phases_of(
    gateway: GatewayProcess, store: Path, receiver_port: int, status_of: Callable[[str], str]
) -> dict[str, int]:
    """Return the phases that a gateway's two processes are in, each with the process' id.

    `status_of` tells the state of the batch that was made of a file.
    """
    if gateway.process is None or gateway.process.poll() is not None:
        return {}
    found: dict[str, int] = {}
    begin, pid = f"{store}/", gateway.process.pid
    hooks = _connections_to(receiver_port)
    for link in _open(pid):
        if link.startswith(begin) and link.endswith(".part"):
            found["upload"] = pid
        elif link in hooks:
            found["webhook"] = pid
    for carrier in carriers(gateway):
        for link in _open(carrier):
            if link.startswith(begin) and link.endswith(".part"):
                found["writing"] = carrier
            elif link.startswith(begin):
                looks = status_of(link.removeprefix(begin)) == "validating"
                found["looking" if looks else "submitting"] = carrier
    return found
