"""The table of a batch's requests, the page of one request, the colour of a batch that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import orjson
from kit.gateways.browser import watched
from kit.gateways.live_stack import MODEL, Stack
from kit.gateways.page_stack import ended, lines, send
from playwright.sync_api import Browser

from demo.stack import ROOT, environment_of, eventually


def submit(
    stack: Stack, folder: Path, name: str, rows: list[dict[str, object]], *words: str
) -> None:
    """Submit requests by the command, and wait for their end."""
    path = folder / f"{name}.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    subprocess.run(
        [sys.executable, "-m", "producer", "submit", path, "--batch-id", name, "--wait", *words],
        env=environment_of({"redis_url": stack.redis.url}), cwd=ROOT, capture_output=True,
        check=False, timeout=60,
    )  # fmt: skip


def rows_of(url: str) -> str:
    return httpx.get(url).text


def test_the_latest_requests_are_a_table_of_prompt_answer_tokens_time_and_finish_reason(
    chrome: Browser, stack: Stack
) -> None:
    batch_id = send(stack, lines(["simulate:fail", ""]))
    ended(stack, batch_id)
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
        table = page.locator("table.requests")
        heads = table.locator("thead th").all_inner_texts()
        assert heads == ["custom_id", "Prompt", "Answer", "Tokens", "Time", "Finish reason"]
        row = table.locator("tbody tr", has_text="request-1")
        cells = row.locator("td").all_inner_texts()
        assert cells[0] == "What is 1 + 1?"
        assert cells[1].startswith("simulated ")
        assert int(cells[2]) > 0
        assert cells[4] == "stop"
        failed = table.locator("tbody tr", has_text="request-0").locator("td").all_inner_texts()
        assert failed[4] == "failed"
        row.locator("a").click()
        page.wait_for_url("**/request?id=request-1")
        told = page.locator("main").inner_text()
        assert "What is 1 + 1?" in told
        assert "2 of questions.jsonl" in told
        assert page.locator("#live-text").inner_text().startswith("simulated ")
        assert view.axe() == [] and view.said == []


def test_a_request_of_producer_submit_has_the_beginning_of_its_prompt(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    asked = "Why is the sky blue? " * 20
    submit(stack, tmp_path, "told", [{"prompt": asked, "model": MODEL}], "--model", MODEL)
    url = f"{stack.gateway.url}/ui/batches/told"
    assert asked[:90] in rows_of(url)
    one = rows_of(f"{url}/request?id=line-1")
    assert asked[:90] in one
    assert "Redis does not keep the whole prompt." in one


def test_an_unknown_custom_id_is_no_such_request_and_one_that_waits_is_one(
    stack: Stack, tmp_path: Path
) -> None:
    url = f"{stack.gateway.url}/ui/batches"
    done = send(stack, lines([""]))
    ended(stack, done)
    answer = httpx.get(f"{url}/{done}/request?id=nope")
    assert (answer.status_code, "No such request: nope" in answer.text) == (404, True)
    held = send(stack, lines(["simulate:sleep=600"] * 9))
    for custom_id, status in (("request-8", 200), ("request-9", 404)):

        def is_there(custom_id: str = custom_id, status: int = status) -> bool:
            return httpx.get(f"{url}/{held}/request?id={custom_id}").status_code == status

        eventually(is_there, 20, custom_id)
    shown = httpx.get(f"{url}/{held}/request?id=request-8").text
    assert "What is 8 + 1?" in shown
    stack.client.batches.cancel(held)
    ended(stack, held)


def test_a_request_of_a_run_that_has_ended_is_not_denied(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(orjson.dumps({"prompt": "Hi", "custom_id": "hi", "model": MODEL}))
    subprocess.run(
        [sys.executable, "-m", "producer", "run", path, tmp_path / "out.jsonl", "--model", MODEL],
        env=environment_of({"redis_url": stack.redis.url}), cwd=ROOT, capture_output=True,
        check=True, timeout=60,
    )  # fmt: skip
    listed = httpx.get(f"{stack.gateway.url}/v1/batches").json()["data"]
    (run,) = [one["id"] for one in listed if (one["metadata"] or {}).get("input") == str(path)]
    url = f"{stack.gateway.url}/ui/batches/{run}"
    answer = httpx.get(f"{url}/request?id=hi")
    assert (answer.status_code, "is in Redis" in answer.text, "OUT" in answer.text) == (
        404, True, True
    )  # fmt: skip
    assert "/request" not in rows_of(url)


def test_a_batch_of_which_all_failed_is_not_green_and_has_one_state_everywhere(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    batch_id = send(stack, lines(["", ""], max_tokens="none"))
    found = ended(stack, batch_id)
    told = subprocess.run(
        [sys.executable, "-m", "producer", "status", batch_id, "--json"],
        env=environment_of({"redis_url": stack.redis.url}), cwd=ROOT, capture_output=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert orjson.loads(told.stdout)["status"] == found.status
    with watched(chrome) as view:
        for path in (f"/ui/batches/{batch_id}", "/ui/batches"):
            view.page.goto(stack.gateway.url + path)
            pill = view.page.locator(f'[data-batch="{batch_id}"] .status').first
            assert pill.inner_text() == found.status
            assert "status-failed" in str(pill.get_attribute("class"))
    some = send(stack, lines(["simulate:fail", ""]))
    ended(stack, some)
    assert "status-partly" in rows_of(f"{stack.gateway.url}/ui/batches/{some}")


def test_ids_are_copied_whole(chrome: Browser, stack: Stack) -> None:
    batch_id = send(stack, lines([""]))
    ended(stack, batch_id)
    with watched(chrome, permissions=["clipboard-read", "clipboard-write"]) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches")
        page.locator(f'[data-copy="{batch_id}"]').click()
        page.locator(f'.copied[data-copy="{batch_id}"]').wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == batch_id
        page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}/request?id=request-0")
        page.locator('[data-copy="request-0"]').click()
        assert view.said == []
