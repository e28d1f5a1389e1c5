"""Lines of the log as JSON, and the words that they may say of what happened."""

from __future__ import annotations

import ast
import contextvars
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson

from contract.log_lines import FIELDS, JsonLines, set_log_fields
from contract.message import Delivery
from demo.stack import ROOT
from worker.drain.endings import log_extra

LEVELS = ("info", "warning", "error", "exception", "critical")


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in ("contract", "worker", "producer", "gateway"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            yield node


def words(tree: ast.Module) -> Iterator[str]:
    """Yield what a module's lines can have as their `action`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                named = isinstance(key, ast.Constant) and key.value == "action"
                if named and isinstance(value, ast.Constant):
                    yield str(value.value)
    for name, at in (("log_extra", 1), ("Line", 1), ("with_error", 2)):
        for call in calls(tree, name):
            if len(call.args) > at and isinstance(call.args[at], ast.Constant):
                yield str(call.args[at].value)


def documented() -> set[str]:
    table = (
        (ROOT / "docs/reference/observing.md")
        .read_text()
        .partition("## Actions")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    return {word for row in rows for word in re.findall(r"`(\w+)`", row)}


def test_the_docs_list_every_action() -> None:
    found = {word for _, tree in modules() for word in words(tree)}
    assert found == documented()


def test_every_line_of_worker_and_gateway_says_its_action() -> None:
    without = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, tree in modules()
        for level in LEVELS
        for call in calls(tree, f"log.{level}")
        if not {"extra"} & {keyword.arg for keyword in call.keywords}
        and path.name != "audit.py"  # its lines are JSON of their own
    ]
    assert without == []


def test_every_line_that_names_a_request_has_its_id_as_a_field() -> None:
    without = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, tree in modules()
        for level in LEVELS
        for call in calls(tree, f"log.{level}")
        if "request %s" in ast.unparse(call.args[0])
        for keyword in call.keywords
        if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict)
        if "request_id" not in ast.unparse(keyword.value)
    ]
    assert without == []


def line_of(text: str, *values: object, **fields: object) -> dict[str, object]:
    """Return what a logger of this test writes, by a handler with the formatter."""
    record = logging.getLogger("t").makeRecord(
        "t", logging.WARNING, __file__, 1, text, values, None, extra=fields
    )
    written = JsonLines().format(record)
    assert "\n" not in written
    return orjson.loads(written)


def test_a_line_has_its_time_level_logger_and_text() -> None:
    line = line_of("%d of\n%s", 1, "two", action="swept", request_id="r", batch_id="")
    assert line.pop("time").endswith("+00:00")
    assert line.pop("process") > 0
    assert line == {
        "level": "WARNING", "logger": "t", "message": "1 of\ntwo", "action": "swept",
        "request_id": "r",
    }  # fmt: skip


def test_each_line_of_a_task_says_what_it_works_on() -> None:
    def work() -> tuple[dict[str, object], dict[str, object]]:
        set_log_fields(batch_id="b", trace_id="t")
        set_log_fields(request_id="r")
        return line_of("one", action="swept"), line_of("two", batch_id="own")

    one, two = contextvars.copy_context().run(work)
    assert {name: one.get(name) for name in FIELDS} == {
        "action": "swept", "batch_id": "b", "request_id": "r", "trace_id": "t",
    }  # fmt: skip
    assert two["batch_id"] == "own"
    assert not set(line_of("three")) & set(FIELDS)


def test_text_that_cannot_be_json_and_a_traceback_are_written_all_the_same() -> None:
    assert line_of("half \ud800 a pair")["message"] == "half ? a pair"
    try:
        raise ValueError("wrong")
    except ValueError:
        record = logging.LogRecord("t", 40, __file__, 1, "failed", (), sys.exc_info())
    assert "ValueError: wrong" in orjson.loads(JsonLines().format(record))["exception"]


def test_a_line_about_a_request_names_it_its_batch_and_its_trace() -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    delivery = Delivery(
        "w/1", "r", "warmq.generate", "b", "", "", 0, None, None, None, None, False,
        {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}, {},
    )  # fmt: skip
    wanted = {"action": "request_error", "request_id": "r", "batch_id": "b", "trace_id": trace}
    assert log_extra(delivery, "request_error") == wanted
