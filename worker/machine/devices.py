"""This machine's NPUs, GPUs, NUMA nodes and memory, as vendors' variables show them.

The NPU vendor's runtime is asked in a separate process: it must not be loaded into this one.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ASK_S = 60.0
#: Chooses the NPUs that the vendor's runtime sees.
VISIBLE = "RBLN_VISIBLE_DEVICES"
_QUESTION = (
    "import json, rebel; "
    "print(json.dumps([rebel.get_npu_name(i) for i in range(rebel.device_count())]))"
)


@dataclass(frozen=True, slots=True)
class Cards:
    """Names of the visible NPUs in order; `error` if they could not be asked for."""

    names: tuple[str, ...] = ()
    error: str | None = None


def visible_cards(devices: str | None) -> Cards:
    """Ask the vendor's runtime for its NPUs; takes seconds."""
    env = os.environ | ({VISIBLE: devices} if devices else {})
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUESTION],
            env=env,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=True,
        )
        return Cards(tuple(str(name) for name in json.loads(done.stdout.splitlines()[-1])))
    except subprocess.TimeoutExpired:
        return Cards(error=f"the runtime did not answer within {ASK_S:g} s")
    except (subprocess.CalledProcessError, ValueError, IndexError, OSError) as error:
        text = getattr(error, "stderr", None) or str(error)
        return Cards(error=text.strip().splitlines()[-1])


def holders(proc: Path = Path("/proc")) -> dict[int, set[int]]:
    """Return the processes that have an NPU open, by its number, if readable."""
    found: dict[int, set[int]] = {}
    for link in proc.glob("[0-9]*/fd/*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue  # it has ended, or is another user's
        number = target.removeprefix("/dev/rbln")
        if number != target and number.isdigit():
            found.setdefault(int(number), set()).add(int(link.parts[-3]))
    return found


@dataclass(frozen=True, slots=True)
class Gpus:
    """The number of GPUs that vLLM can use, and a sentence about its source."""

    count: int
    source: str


def visible_gpus(dev: Path = Path("/dev")) -> Gpus | None:
    """Count NVIDIA GPUs without their driver's library; None where nothing is known."""
    shown = len(list(dev.glob("nvidia[0-9]*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return Gpus(shown, f"this machine shows {shown}") if shown else None
    names = [name.strip() for name in chosen.split(",")]
    # The driver ignores the first entry that names no GPU, and all that follow it.
    count = next((n for n, name in enumerate(names) if name in ("", "-1")), len(names))
    source = f"CUDA_VISIBLE_DEVICES={chosen} names {count}"
    if 0 < shown < count and not chosen.startswith("MIG"):
        return Gpus(shown, f"{source} of which this machine shows {shown}")
    return Gpus(count, source)


def nvidia_driver(root: Path = Path("/"), library: str = "libcuda.so.1") -> int | None:
    """Return the major version of NVIDIA's driver; 0: hidden, None: no driver.

    Its library is loaded but not called: a process that cannot load it finds no GPU.
    """
    try:
        ctypes.CDLL(library)
    except OSError:
        return None
    found = re.search(r"\s(\d+)\.\d+", _read(root / "proc/driver/nvidia/version"))
    return int(found[1]) if found else 0


def cuda_compiler() -> Path | None:
    """Return the nvcc of libraries that compile at run time; None without one."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = None if named else shutil.which("nvcc")
    nvcc = Path(found) if found else Path(named or "/usr/local/cuda") / "bin" / "nvcc"
    return nvcc if nvcc.exists() else None


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> int:
    """Return the number of NUMA nodes, at least 1."""
    return max(1, len(list(folder.glob("node[0-9]*"))))


def vllm_binds_cores() -> bool:
    """Whether vLLM chooses the cores of its CPU processes."""
    simulated = os.environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0"
    return os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") == "auto" and not simulated


def folder_size(folder: Path) -> int:
    """Return the bytes of a folder's own files."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


# -- the memory of NUMA nodes --------------------------------------------------------
# Counted as in vllm/utils/cpu_resource_utils.py: vLLM's CPU engine refuses to start by these
# numbers.

ROOT = Path("/")
#: The parts of a node's memory that add up to `MemAvailable`, a line that nodes do not have.
AVAILABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
#: A group's limit and usage: cgroup v2, v1.
FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
#: cgroup v1 writes a limit this high for none.
NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: all, and free."""

    total: int
    free: int


def visible_nodes(root: Path = ROOT) -> list[Memory]:
    """Return the memory of vLLM's nodes, in its order; at least one."""
    numbers = _allowed(root)
    if chosen := os.environ.get("CPU_VISIBLE_MEMORY_NODES"):
        wanted = [int(word) for word in chosen.split(",") if word.strip().isdecimal()]
        numbers = [number for number in wanted if number in numbers] or numbers
    nodes = []
    for number in numbers:
        sizes = _sizes(root / f"sys/devices/system/node/node{number}/meminfo")
        if total := sizes.get("MemTotal"):
            nodes.append(Memory(total, sum(sizes.get(name, 0) for name in AVAILABLE)))
    nodes = nodes or [machine(root)]
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
    """Return the bytes that the process's cgroups still allow; None without a limit.

    vLLM reads only the outermost one, but the kernel kills by all of them.
    """
    return min((limit.free for limit in _limits(root)), default=None)


def _allowed(root: Path) -> list[int]:
    """Return the numbers of the nodes that this process may use."""
    found = re.search(r"^Mems_allowed_list:(.*)$", _read(root / "proc/self/status"), re.MULTILINE)
    numbers: list[int] = []
    for part in (found[1] if found else "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers or [0]


def _sizes(meminfo: Path) -> dict[str, int]:
    """Read "MemTotal:  6514904 kB", with or without "Node 0" before it, as bytes by name."""
    found = re.findall(r"^(?:Node \d+ )?(\S+):\s+(\d+)", _read(meminfo), re.MULTILINE)
    return {name: int(kibibytes) * 1024 for name, kibibytes in found}


def _limits(root: Path) -> Iterator[Memory]:
    """Yield the limits of the process's cgroups, from its own to the outermost."""
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
