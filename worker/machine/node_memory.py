"""The memory that vLLM's CPU engine may take: of one NUMA node, within its cgroups' limits.

Counted as vLLM does (vllm/utils/cpu_resource_utils.py), which refuses to start by these numbers.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
#: What the kernel can give: `MemAvailable` of a node, which has no such line.
AVAILABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
#: A group's limit and what it uses: cgroup v2, v1.
FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
#: A limit this high is cgroup v1's word for none.
NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in all, and those that are free."""

    total: int
    free: int


def visible_nodes(root: Path = ROOT) -> list[Memory]:
    """Return the nodes that vLLM may use, in its order, each as vLLM sees it; at least one."""
    numbers = _allowed(root)
    if chosen := os.environ.get("CPU_VISIBLE_MEMORY_NODES"):
        wanted = [int(word) for word in chosen.split(",") if word.strip().isdecimal()]
        numbers = [number for number in wanted if number in numbers] or numbers
    found = [_node(root / f"sys/devices/system/node/node{number}/meminfo") for number in numbers]
    nodes = [node for node in found if node is not None] or [machine(root)]
    container = root / "sys/fs/cgroup"
    limit = _limit(container) or _limit(container / "memory")
    if limit is None:
        return nodes
    return [
        Memory(limit.total, max(0, min(node.free, limit.free)))
        if limit.total < node.total else node
        for node in nodes
    ]  # fmt: skip


def machine(root: Path = ROOT) -> Memory:
    """Return the memory of the whole machine; zeros if it is not known."""
    sizes = _sizes(root / "proc/meminfo")
    return Memory(sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0))


def own_limit(root: Path = ROOT) -> int | None:
    """Return what the process's own cgroups still allow, in bytes; None without a limit.

    vLLM looks only at the outermost, but the kernel kills by all of them.
    """
    return min((limit.free for limit in _groups(root)), default=None)


def _allowed(root: Path) -> list[int]:
    text = _read(root / "proc/self/status")
    lines = (line for line in text.splitlines() if line.startswith("Mems_allowed_list:"))
    numbers: list[int] = []
    for part in next(lines, ":").partition(":")[2].strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers or [0]


def _node(meminfo: Path) -> Memory | None:
    sizes = _sizes(meminfo)
    if not sizes.get("MemTotal"):
        return None
    return Memory(sizes["MemTotal"], sum(sizes.get(name, 0) for name in AVAILABLE))


def _sizes(meminfo: Path) -> dict[str, int]:
    """Read "MemTotal:  6514904 kB", or with "Node 0" before it, as bytes by name."""
    found = re.findall(r"^(?:Node \d+ )?(\S+):\s+(\d+)", _read(meminfo), re.MULTILINE)
    return {name: int(kibibytes) * 1024 for name, kibibytes in found}


def _groups(root: Path) -> Iterator[Memory]:
    """Yield the limits of the process's groups, from its own to the outermost."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if limit := _limit(group):
                yield limit
            if group == top:
                break


def _limit(group: Path) -> Memory | None:
    for most, used in FILES:
        total = _read(group / most).strip()
        if total.isdecimal() and int(total) < NO_LIMIT:
            return Memory(int(total), max(0, int(total) - int(_read(group / used).strip() or 0)))
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
