"""Every PromQL expression of the dashboards and rules, and the series and labels it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import promql_parser
import yaml

from demo.stack import ROOT

DASHBOARDS = sorted((ROOT / "compose" / "grafana").glob("*.json"))
RULES = sorted((ROOT / "compose" / "prometheus").glob("*.yml"))
#: What Grafana puts in the place of its variables.
VARIABLES = {"$__rate_interval": "1m", "$queue": ".*"}


class Expression(NamedTuple):
    """Where an expression stands, and its text without Grafana's variables."""

    where: str
    text: str


class Selector(NamedTuple):
    """A series that is asked for, with the labels that are compared."""

    series: str
    labels: frozenset[str]


def of_dashboards() -> list[Expression]:
    """Return the expressions of all panels."""
    return [
        Expression(f"{file.name}: {panel['title']} {target['refId']}", filled(target["expr"]))
        for file in DASHBOARDS
        for panel in json.loads(file.read_text())["panels"]
        for target in panel["targets"]
    ]


def of_rules() -> list[Expression]:
    """Return the expressions of all recording rules and alerts."""
    return [Expression(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


def rules() -> list[dict[str, Any]]:
    """Return all rules."""
    return [
        rule
        for file in RULES
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    ]


def filled(text: str) -> str:
    """Return an expression as Grafana would send it."""
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    return text


def selectors(text: str) -> Iterator[Selector]:
    """Return what an expression asks for.

    Raises:
        ValueError: it is no PromQL.
    """
    yield from _below(promql_parser.parse(text))


def grouped_by(text: str) -> set[str]:
    """Return the labels that an expression groups by or matches on."""
    lists = re.findall(r"\b(?:by|on|ignoring|without|group_left|group_right) *\(([^)]*)\)", text)
    return {name.strip() for each in lists for name in each.split(",")} - {""}


def _below(node: Any) -> Iterator[Selector]:
    if isinstance(node, promql_parser.VectorSelector):
        labels = {matcher.name for matcher in node.matchers.matchers}
        yield Selector(node.name, frozenset(labels))
        return
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if (below := getattr(node, name, None)) is not None and not isinstance(below, str | float):
            yield from _below(below)
    for each in getattr(node, "args", None) or ():
        yield from _below(each)
