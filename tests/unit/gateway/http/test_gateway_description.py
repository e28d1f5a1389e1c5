"""The gateway's OpenAPI document: valid, and of exactly the routes that there are."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from demo.stack import ROOT
from gateway.app import routes
from gateway.description.document import document
from gateway.page.view import is_page


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(orjson.dumps(document()))
    return found


def test_the_document_is_openapi_3_1(made: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(made).validate()


def test_it_describes_the_routes_that_there_are_and_no_others(made: dict[str, Any]) -> None:
    served = {
        (method, re.sub(r":\w+\}", "}", route.path))
        for route in routes()
        if not is_page(route.path)  # those of people, not of programs
        for method in (route.methods or {"POST"}) - {"HEAD"}
    }
    described = {(m.upper(), path) for path, methods in made["paths"].items() for m in methods}
    assert described == served


def test_the_page_lists_the_routes_that_there_are_and_no_others(made: dict[str, Any]) -> None:
    page = (ROOT / "docs/reference/gateway.md").read_text().partition("## Routes")[2]
    shown = set(re.findall(r"`(/[^`]*)`", page.partition("\n## ")[0]))
    assert shown == {re.sub(r"\{\w+\}", "{id}", path) for path in made["paths"]}


def test_operations_have_ids_of_their_own(made: dict[str, Any]) -> None:
    ids = [each["operationId"] for path in made["paths"].values() for each in path.values()]
    assert len(set(ids)) == len(ids)


def test_every_schema_is_named_by_something(made: dict[str, Any]) -> None:
    text = orjson.dumps(made).decode()
    for name in made["components"]["schemas"]:
        assert f'"#/components/schemas/{name}"' in text, name
