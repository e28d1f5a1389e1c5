"""The list of batches: filters, orders, names, and what a phone shows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.commands.support import run_producer
from kit.gateways.browser import watched
from kit.gateways.live_stack import Stack
from kit.gateways.page_stack import ended, lines, send
from kit.protocol.lessee import submit_batch
from playwright.sync_api import Browser

from producer import Client


@pytest.fixture(scope="module")
def ids(stack: Stack) -> dict[str, str]:
    """Make three batches: of two requests, of one that fails, of a tenant's submit."""
    found = {
        "good": send(stack, lines(["", ""]), "reviews.jsonl"),
        "bad": send(stack, lines(["simulate:fail"]), "other.jsonl"),
    }
    made = stack.client.files.create(file=("mine.jsonl", lines([""])), purpose="batch")
    found["named"] = stack.client.batches.create(
        input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h",
        metadata={"name": "Friday's labels"},
    ).id  # fmt: skip
    for batch_id in found.values():
        ended(stack, batch_id)
    submit_batch(stack.store, batch_id="of-x", tenant="x")
    return found | {"of-x": "of-x"}


def test_a_list_is_filtered_and_sorted(chrome: Browser, stack: Stack, ids: dict[str, str]) -> None:
    names = {batch_id: name for name, batch_id in ids.items()}
    with watched(chrome) as view:

        def shown() -> list[str]:
            rows = view.page.locator("tr[data-batch]").all()
            return [names[str(row.get_attribute("data-batch"))] for row in rows]

        url = f"{stack.gateway.url}/ui/batches"
        for query, expected in (
            ("text=REVIEWS", ["good"]),
            ("text=friday", ["named"]),
            ("tenant=x", ["of-x"]),
            ("state=in_progress", ["of-x"]),
            ("state=cancelling", []),
            ("model=small&text=.jsonl&sort=created", ["good", "bad", "named"]),
            ("text=no-such-text", []),
            ("sort=wrong&text=other", ["bad"]),
        ):
            view.page.goto(f"{url}?{query}")
            if query.endswith("created"):  # all of one second are equal
                assert sorted(shown()) == sorted(expected), query
            else:
                assert shown() == expected, query
        view.page.goto(url)
        view.page.get_by_role("link", name="Failed").click()
        view.page.wait_for_url("**sort=-failed")
        assert shown()[0] == "bad"
        view.page.get_by_role("link", name="Failed").click()
        view.page.wait_for_url("**sort=failed")
        assert shown()[-1] == "bad"
        view.page.fill("#text", "reviews")
        view.page.get_by_role("button", name="Filter").click()
        view.page.wait_for_url("**text=reviews**")
        assert shown() == ["good"]
        assert "sort=failed" in view.page.url
        assert view.axe() == [] and view.said == []


def test_names_and_tenants_are_shown_and_one_house_has_all(
    chrome: Browser, stack: Stack, ids: dict[str, str]
) -> None:
    with watched(chrome) as view:
        view.page.goto(f"{stack.gateway.url}/ui/batches")
        named = view.page.locator(f'[data-batch="{ids["named"]}"]').inner_text()
        assert "Friday's labels" in named and "mine.jsonl" in named
        assert "tenant x" in view.page.locator('[data-batch="of-x"]').inner_text()
        view.page.goto(f"{stack.gateway.url}/ui/batches/of-x")
        assert view.page.locator("h1").inner_text() == "of-x"
    assert "of-x" in [batch.id for batch in stack.client.batches.list()]


@pytest.mark.parametrize("language", ["en", "ko"])
def test_a_phone_shows_rate_time_and_failures(
    chrome: Browser, stack: Stack, ids: dict[str, str], language: str
) -> None:
    with watched(chrome, width=390, height=844, language=language) as view:
        for path in ("/ui/batches", "/ui"):
            view.page.goto(stack.gateway.url + path)
            row = view.page.locator(f'[data-batch="{ids["bad"]}"]')
            for field in ("rate", "left", "failed"):
                assert row.locator(f'[data-b="{field}"]').is_visible(), field
            assert row.locator('[data-b="failed"]').inner_text() == "1"
            assert view.page.evaluate("document.documentElement.scrollWidth") <= 390
            assert view.axe() == []


def test_every_way_to_submit_gives_a_batch_with_its_page(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    file = tmp_path / "hello.jsonl"
    file.write_bytes(lines([""]))
    options = ("--model", "small", "--batch-id", "of-command", "--wait")
    assert run_producer("submit", file, *options, redis_url=stack.redis.url).returncode == 0
    with Client(stack.redis.url) as client:
        client.submit([{"prompt": "x"}], model="small", batch_id="of-client").wait()
    made = stack.client.files.create(file=("a.jsonl", lines([""])), purpose="batch")
    foreign: list[Any] = [None, {}, {"team": "x", "trial": "1"}, {"trial_of": "", "name": ""}]
    over_http = [
        stack.client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h",
            metadata=metadata,
        ).id
        for metadata in foreign
    ]  # fmt: skip
    for batch_id in over_http:
        ended(stack, batch_id)
    with watched(chrome) as view:
        for batch_id in ("of-command", "of-client", *over_http):
            answer = view.page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
            assert answer and answer.status == 200, batch_id
            assert batch_id in view.page.locator("main").inner_text()
        assert view.said == []
