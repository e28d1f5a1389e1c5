"""Modules and functions stay short enough to be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for room in ("contract", "gateway", "producer", "worker")
    for path in sorted((ROOT / room).rglob("*"))
    if path.suffix in (".py", ".lua")
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODULE_LINES = 400
FUNCTION_LINES = 50


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_longer_than_400_lines_and_no_function_longer_than_50(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MODULE_LINES
    if path.suffix == ".py":
        functions = (
            node for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )  # fmt: skip
        lengths = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno}
        assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES} == {}


def test_no_module_of_the_tests_is_longer_either() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in TESTS}
    assert len(lengths) > 500
    assert {path: lines for path, lines in lengths.items() if lines > MODULE_LINES} == {}
