"""Dashboards and rules: each expression parses, and asks for what real pages have."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.chart.expressions import (
    DASHBOARDS,
    Expression,
    grouped_by,
    of_dashboards,
    of_rules,
    rules,
    selectors,
)
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import simulated
from prometheus_client.parser import text_string_to_metric_families

from demo.stack import ROOT, RedisServer, eventually, free_port

EVERY = [*of_dashboards(), *of_rules()]
#: Labels that only Prometheus adds.
ADDED = {"job", "instance"}


def samples(url: str) -> dict[str, set[str]]:
    """Return the labels of each sample of a page, by its name."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """The samples of a worker's and a gateway's page, with their labels."""
    folder, port = tmp_path_factory.mktemp("pages"), free_port()
    with (
        RedisServer(folder / "redis") as redis,
        simulated(redis.url, folder / "worker.log", metrics_port=port),
        GatewayProcess(redis.url, folder) as gateway,
    ):

        def both() -> dict[str, set[str]] | None:
            try:
                found = samples(f"http://127.0.0.1:{port}/metrics")
            except OSError:
                return None
            found |= samples(f"{gateway.url}/metrics")
            return found if "warmq_waiting" in found and "warmq_workers" in found else None

        yield eventually(both, 60, "both pages are whole", 0.5)


@pytest.mark.parametrize("expression", EVERY, ids=[each.where for each in EVERY])
def test_an_expression_asks_for_series_and_labels_that_there_are(
    expression: Expression, pages: dict[str, set[str]]
) -> None:
    asked = list(selectors(expression.text))
    assert asked, "it asks for nothing"
    has: set[str] = set()
    for series, labels in asked:
        assert series in pages, f"{series}: no page has it"
        assert labels <= pages[series] | ADDED, f"{series} has {sorted(pages[series])}"
        has |= pages[series]
    assert grouped_by(expression.text) <= has | ADDED


@pytest.mark.parametrize("wrong", ["sum by (le (x)", "rate(warmq_requests_total)", "sum(", "x{y=}"])
def test_the_parser_refuses_what_is_no_promql(wrong: str) -> None:
    with pytest.raises(ValueError):
        list(selectors(wrong))


@pytest.mark.parametrize("file", DASHBOARDS, ids=[file.name for file in DASHBOARDS])
def test_a_dashboard_can_be_imported(file: Path) -> None:
    board = json.loads(file.read_text())
    assert board["id"] is None
    assert len(board["uid"]) <= 40
    assert board["uid"] == f"warmq-{file.stem}"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {f"${each['name']}" for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(board["panels"])))
    assert {f"${name}" for name in used} - {"$__rate_interval"} <= variables
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_every_alert_has_a_summary_and_a_runbook_that_is_there() -> None:
    page = (ROOT / "docs/how-to/operations.md").read_text()
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 10
    for rule in alerts:
        assert rule["annotations"]["summary"]
        assert rule["for"]
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert file == "docs/how-to/operations.md"
        assert anchor == rule["alert"].lower()
        assert f"\n### {rule['alert']}\n" in page
