"""Finds the NPUs, GPUs, NUMA nodes and memory that environment variables make visible.

The NPU vendor's runtime runs in a separate process, because it must not be loaded into this one.
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

#: Seconds in which the NPU vendor's runtime has to list the NPUs.
ASK_S = 60.0
#: The variable that limits the NPUs that the vendor's runtime sees.
VISIBLE = "RBLN_VISIBLE_DEVICES"
#: The Python program that lists the names of the NPUs.
_QUESTION = (
    "import json, rebel; "
    "print(json.dumps([rebel.get_npu_name(i) for i in range(rebel.device_count())]))"
)


@dataclass(frozen=True, slots=True)
class Cards:
    """The names of the visible NPUs, in order; `error` if they could not be listed."""

    names: tuple[str, ...] = ()
    error: str | None = None


def visible_cards(devices: str | None) -> Cards:
    """List the NPUs with the vendor's runtime. Takes seconds."""
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
    """Return the pids that have an NPU open, by the NPU's number, where readable."""
    pids: dict[int, set[int]] = {}
    for link in proc.glob("[0-9]*/fd/*"):
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the process has ended, or is another user's
        number = target.removeprefix("/dev/rbln")
        if number != target and number.isdigit():
            pids.setdefault(int(number), set()).add(int(link.parts[-3]))
    return pids


@dataclass(frozen=True, slots=True)
class Gpus:
    """The number of GPUs that vLLM can use, and a text about the number's source."""

    count: int
    source: str


def visible_gpus(dev: Path = Path("/dev")) -> Gpus | None:
    """Count NVIDIA GPUs without their driver's library; None if nothing shows any."""
    shown = len(list(dev.glob("nvidia[0-9]*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return Gpus(shown, f"this machine shows {shown}") if shown else None
    names = [name.strip() for name in chosen.split(",")]
    # The driver ignores the first entry that does not name a GPU, and all entries after it.
    count = next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
    source = f"CUDA_VISIBLE_DEVICES={chosen} names {count}"
    if 0 < shown < count and not chosen.startswith("MIG"):
        return Gpus(shown, f"{source} of which this machine shows {shown}")
    return Gpus(count, source)


def nvidia_driver(root: Path = Path("/"), library: str = "libcuda.so.1") -> int | None:
    """Return the driver's major version: 0 if it cannot be read, None without a driver.

    The driver's library is loaded but not called. A process that cannot load it finds no GPU.
    """
    try:
        ctypes.CDLL(library)
    except OSError:
        return None
    match = re.search(r"\s(\d+)\.\d+", _read(root / "proc/driver/nvidia/version"))
    return int(match[1]) if match else 0


def cuda_compiler() -> Path | None:
    """Return the nvcc with which FlashInfer and other libraries compile at run time, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    in_path = None if home else shutil.which("nvcc")
    nvcc = Path(in_path) if in_path else Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    return nvcc if nvcc.exists() else None


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> int:
    """Return the number of NUMA nodes, at least 1."""
    return max(1, len(list(folder.glob("node[0-9]*"))))


def vllm_binds_cores() -> bool:
    """Whether vLLM chooses the cores for its CPU processes."""
    simulated = os.environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0"
    return os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") == "auto" and not simulated


def folder_size(folder: Path) -> int:
    """Return the bytes of the files directly in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


# -- the memory of NUMA nodes --------------------------------------------------------
# These numbers are computed as in vllm/utils/cpu_resource_utils.py, because vLLM's CPU engine
# compares them with the memory that it needs, and may refuse to start.

#: The root of the file system; tests use another.
ROOT = Path("/")
#: Entries of a node's meminfo that add up to `MemAvailable`, which nodes do not have.
AVAILABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
#: Files with a cgroup's limit and usage, in cgroup v2 and in v1.
FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
#: cgroup v1 shows a limit of this size or more if there is none.
NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes."""

    total: int
    free: int


def visible_nodes(root: Path = ROOT) -> list[Memory]:
    """Return the memory of the NUMA nodes that vLLM's CPU engine uses, in vLLM's order."""
    numbers = _allowed(root)
    if chosen := os.environ.get("CPU_VISIBLE_MEMORY_NODES"):
        chosen_numbers = [int(word) for word in chosen.split(",") if word.strip().isdecimal()]
        numbers = [number for number in chosen_numbers if number in numbers] or numbers
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
    """Return the memory of the whole machine; zeros if it cannot be read."""
    sizes = _sizes(root / "proc/meminfo")
    return Memory(sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0))


def own_limit(root: Path = ROOT) -> int | None:
    """Return the bytes that this process's cgroups still allow; None without a limit.

    vLLM reads only the outermost cgroup, but the kernel kills a process that exceeds any of them.
    """
    return min((limit.free for limit in _limits(root)), default=None)


def _allowed(root: Path) -> list[int]:
    """Return the numbers of the NUMA nodes that this process may use."""
    match = re.search(r"^Mems_allowed_list:(.*)$", _read(root / "proc/self/status"), re.MULTILINE)
    numbers: list[int] = []
    for part in (match[1] if match else "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers or [0]


def _sizes(meminfo: Path) -> dict[str, int]:
    """Return the bytes by name from lines such as "MemTotal:  6514904 kB" or "Node 0 MemFree…"."""
    entries = re.findall(r"^(?:Node \d+ )?(\S+):\s+(\d+)", _read(meminfo), re.MULTILINE)
    return {name: int(kibibytes) * 1024 for name, kibibytes in entries}


def _limits(root: Path) -> Iterator[Memory]:
    """Yield the limits of this process's cgroups, from the innermost to the outermost."""
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
    """Return a cgroup's limit and what is left of it; None without a limit."""
    for limit_file, usage_file in FILES:
        total = _read(group / limit_file).strip()
        if total.isdecimal() and int(total) < NO_LIMIT:
            return Memory(
                int(total), max(0, int(total) - int(_read(group / usage_file).strip() or 0))
            )
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
