"""contract has what packages agree on: nothing that one of them alone uses."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.redis.scripts import SHARED
from demo.stack import ROOT

PACKAGES = ("contract", "gateway", "producer", "worker")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
}
SCRIPTS = sorted(path.stem for path in (ROOT / "contract" / "lua").glob("*.lua"))


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of ours that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in MODULES else node.module


def importers() -> dict[str, set[str]]:
    found = defaultdict(set)
    for name, path in MODULES.items():
        for other in imported(path):
            found[other].add(name)
    return found


IMPORTERS = importers()


def packages_of(module: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the packages besides contract that use one of its modules, through others of it."""
    found = set()
    for name in IMPORTERS[module] - seen:
        package = name.partition(".")[0]
        found |= packages_of(name, seen | {module}) if package == "contract" else {package}
    return found


OURS = sorted(
    name for name, path in MODULES.items()
    if name.startswith("contract.") and path.name != "__init__.py"
)  # fmt: skip


@pytest.mark.parametrize("module", OURS)
def test_a_module_of_contract_is_used_by_two_packages_or_more(module: str) -> None:
    assert len(packages_of(module)) > 1, f"{module} is for {packages_of(module) or 'nobody'} alone"


def test_the_drain_is_seen_to_be_the_workers_alone() -> None:
    assert packages_of("worker.drain.leases") == {"worker"}


def constants(name: str) -> set[str]:
    tree = ast.parse(MODULES[name].read_text())
    return {node.value for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip


WORDS = {name: constants(name) for name in MODULES}


@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - set(SHARED)))
def test_a_script_of_contract_is_run_by_two_packages_or_more(script: str) -> None:
    users = [name for name, words in WORDS.items() if script in words]
    sides = {name.partition(".")[0] for name in users} - {"contract"}
    for name in users:
        sides |= packages_of(name) if name.startswith("contract.") else set()
    assert len(sides) > 1, f"{script} is for {sides or 'nobody'} alone"
