"""A person at the page, with vLLM and the shipped model behind it, from the login to the logout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.engines.run_batch_lines import NAME
from kit.gateways.browser import watched
from kit.gateways.real_gateway import questions_as_batch, real_gateway
from playwright.sync_api import Browser, Page, expect

from contract.openai.body import CHAT_URL
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually
from gateway.redis.api_keys import ApiKeys


def grows_while_it_is_looked_at(page: Page, batch_url: str) -> bool:
    """Open a running request of a batch; say whether its text grew: one may end before."""
    page.goto(batch_url)
    running = page.get_by_role("link", name="story-")
    if not running.count():
        return False
    running.first.click()
    page.wait_for_url(re.compile(r"/request\?id=story-"))
    text, lengths = page.locator("#live-text"), set()

    def longer() -> bool:
        lengths.update([len(text.inner_text())] if text.count() else [])
        return len(lengths - {0}) > 1

    try:
        return eventually(longer, 10, "its text grows", every_s=0.05)
    except TimeoutError:
        return False


def watch_and_cancel(page: Page, address: str, folder: Path, story: dict[str, Any]) -> None:
    """Send stories enough for minutes, read one while it is written, and cancel their batch."""
    file = folder / "stories.jsonl"
    stories = [
        story
        | {"custom_id": f"story-{n}", "body": story["body"] | {"max_tokens": 200 + n * 131 % 700}}
        for n in range(500)
    ]
    file.write_bytes(b"\n".join(map(orjson.dumps, stories)))
    page.goto(address)
    page.set_input_files("#file", file)
    page.get_by_role("button", name="Upload and plan").click()
    page.get_by_role("button", name="Start").click()
    page.wait_for_url("**/ui/batches/batch_*")
    batch_url = page.url.partition("?")[0]
    expect(page.locator("#pulse")).to_have_class("pulse on", timeout=15_000)
    width = '() => Number(document.querySelector(".bar-done").getAttribute("width"))'
    begun = eventually(lambda: page.evaluate(width), 60, "the bar begins", every_s=0.05)
    eventually(lambda: page.evaluate(width) > begun, 60, "the bar moves", every_s=0.05)
    eventually(lambda: grows_while_it_is_looked_at(page, batch_url), 120, "a text grows")
    page.goto(batch_url)
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("The batch is being cancelled.").wait_for()
    expect(page.locator(".status-cancelled").first).to_be_visible(timeout=60_000)


@pytest.mark.timeout(400)
def test_a_person_logs_in_sends_watches_reads_downloads_cancels_and_logs_out(
    chrome: Browser, tmp_path: Path
) -> None:
    questions, lines = questions_as_batch(200)
    body = {"model": NAME, "messages": [{"role": "user", "content": "Tell me a long story."}]}
    long = {"max_tokens": 900, "ignore_eos": True}
    story = {"custom_id": "story", "method": "POST", "url": CHAT_URL, "body": body | long}
    too_long = story | {"custom_id": "too-long", "body": body | {"max_tokens": 10**6}}
    file = tmp_path / "questions.jsonl"
    file.write_bytes(b"\n".join(orjson.dumps(one) for one in [*lines, too_long]))
    with real_gateway(tmp_path) as real, watched(chrome, accept_downloads=True) as view:
        port = int(real.redis_url.rpartition(":")[2].partition("/")[0])
        with RedisServer(tmp_path / "unused", port=port).client() as client:
            store = ApiKeys.using(BatchStore(client, ttl_ms=60_000))
            secret, _ = store.create("person")
            page, url = view.page, real.url.removesuffix("/v1")

            def asked_for_a_key() -> bool:
                page.goto(f"{url}/ui")
                return "/ui/login" in page.url

            eventually(asked_for_a_key, 10, "the gateway knows that there are keys", every_s=0.2)
            page.fill("#key", secret)
            page.keyboard.press("Enter")
            page.get_by_role("link", name="Submit").first.click()
            page.set_input_files("#file", file)
            page.get_by_role("button", name="Upload and plan").click()
            page.get_by_role("button", name="Start").click()
            page.wait_for_url("**/ui/batches/batch_*")
            batch_url = page.url.partition("?")[0]
            page.goto(batch_url)
            expect(page.locator(".status-partly").first).to_be_visible(timeout=120_000)
            page.get_by_role("heading", name="Failed requests").wait_for()
            assert "too-long" in page.locator("main").inner_text()
            with page.expect_download() as got:
                page.get_by_role("link", name="Answers").click()
            found = Path(got.value.path()).read_bytes().splitlines()
            answers = {one["custom_id"]: one for one in map(orjson.loads, found)}
            assert set(answers) == {line["custom_id"] for line in lines}
            said = [
                answers[f"q{n}"]["response"]["body"]["choices"][0]["message"]["content"]
                for n in range(len(questions))
            ]
            assert all(said)
            # The line is wrong itself: no button offers to run it again
            page.get_by_text("Invalid lines, which a retry does not change: 1.").wait_for()
            assert page.get_by_role("button", name="Retry").count() == 0
            watch_and_cancel(page, f"{url}/ui/submit", tmp_path, story)
            for path in ("", "/batches", "/workers", "/tenants", "/dead", "/submit"):
                page.goto(f"{url}/ui{path}")
                assert view.axe() == [], path
            page.goto(f"{url}/ui/workers")
            assert page.locator(".worker").count() == 1
            assert view.said == []
            page.get_by_role("button", name="Log out").click()
            page.wait_for_url("**/ui/login")
