"""The memory of the NUMA nodes and the limits of cgroups, read from made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.machine.devices import Memory, own_limit, visible_nodes

KB = 1024


def machine(root: Path, files: dict[str, str]) -> Path:
    """Write the files of /proc and /sys that a machine would have."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def node(number: int, total: int, free: int, file: int = 0) -> dict[str, str]:
    """Return a node's meminfo; sizes in kB."""
    lines = {"MemTotal": total, "MemFree": free, "Active(file)": file, "Inactive(file)": 0,
             "SReclaimable": 0, "AnonPages": 5}  # fmt: skip
    text = "".join(f"Node {number} {name}:  {size} kB\n" for name, size in lines.items())
    return {f"sys/devices/system/node/node{number}/meminfo": text}


TWO = node(0, 1000, 300, file=100) | node(1, 2000, 1500)


@pytest.fixture(autouse=True)
def all_nodes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of vLLM's hides a node."""
    monkeypatch.delenv("CPU_VISIBLE_MEMORY_NODES", raising=False)
    return monkeypatch


def allowed(nodes: str) -> dict[str, str]:
    return {"proc/self/status": f"Name:\tx\nMems_allowed_list:\t{nodes}\n"}


@pytest.mark.parametrize(
    ("nodes", "variable", "seen"),
    [("0-1", "", [(1000, 400), (2000, 1500)]), ("1", "", [(2000, 1500)]),
     ("0-1", "1", [(2000, 1500)]), ("0-1", "1,0", [(2000, 1500), (1000, 400)]),
     ("0", "1", [(1000, 400)]), ("0-1", "x", [(1000, 400), (2000, 1500)])],
)  # fmt: skip
def test_the_nodes_that_vllm_may_use(
    tmp_path: Path, all_nodes: pytest.MonkeyPatch, nodes: str, variable: str,
    seen: list[tuple[int, int]],
) -> None:  # fmt: skip
    all_nodes.setenv("CPU_VISIBLE_MEMORY_NODES", variable)
    root = machine(tmp_path, TWO | allowed(nodes))
    assert visible_nodes(root) == [Memory(total * KB, free * KB) for total, free in seen]


def test_a_machine_without_nodes_is_one(tmp_path: Path) -> None:
    meminfo = "MemTotal:  900 kB\nMemFree:  10 kB\nMemAvailable:  700 kB\n"
    root = machine(tmp_path, {"proc/meminfo": meminfo})
    assert visible_nodes(root) == [Memory(900 * KB, 700 * KB)]
    assert own_limit(root) is None


@pytest.mark.parametrize(
    ("limit", "used"),
    [("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
     ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes")],
)  # fmt: skip
def test_a_containers_limit_counts_where_it_is_lower(tmp_path: Path, limit: str, used: str) -> None:
    files = TWO | allowed("0-1") | {limit: f"{1500 * KB}\n", used: f"{1200 * KB}\n"}
    assert visible_nodes(machine(tmp_path, files)) == [
        Memory(1000 * KB, 400 * KB), Memory(1500 * KB, 300 * KB)
    ]  # fmt: skip
    for none in ("max\n", str(2**63 - 4096)):
        root = machine(tmp_path, {limit: none})
        assert visible_nodes(root)[1] == Memory(2000 * KB, 1500 * KB)


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [("0::/a/b", "sys/fs/cgroup", ("memory.max", "memory.current")),
     ("4:cpu,memory:/a/b", "sys/fs/cgroup/memory",
      ("memory.limit_in_bytes", "memory.usage_in_bytes"))],
)  # fmt: skip
def test_the_lowest_limit_of_the_processs_own_groups_counts(
    tmp_path: Path, line: str, folder: str, names: tuple[str, str]
) -> None:
    limit, used = names
    files = {"proc/self/cgroup": f"9:pids:/other\n{line}\n"}
    assert own_limit(machine(tmp_path, files)) is None
    files = {f"{folder}/a/{limit}": "1000", f"{folder}/a/{used}": "900",
             f"{folder}/a/b/{limit}": "500", f"{folder}/a/b/{used}": "100"}  # fmt: skip
    assert own_limit(machine(tmp_path, files)) == 100
    assert own_limit(machine(tmp_path, {f"{folder}/a/{used}": "2000"})) == 0
