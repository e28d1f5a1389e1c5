"""What failed and what stalls: on the overview and on the page of a batch, while it is open."""

from __future__ import annotations

import datetime as dt
import re
import time
from pathlib import Path

import orjson
from kit.commands.doctor_findings import announce, up_for_long
from kit.commands.support import answer, batch_file, run_producer
from kit.gateways.browser import watched
from kit.gateways.live_stack import QUEUE, Stack
from kit.gateways.page_stack import ended, lines, send
from kit.protocol.lessee import Lessee, client_of
from playwright.sync_api import Browser, Page, expect

from contract.message import read_delivery
from contract.redis import keys
from contract.redis.history import DAY, HistoryReads
from contract.results import success_meta
from demo.stack import eventually
from worker.drain.endings import Ending, done_arguments


def counts(page: Page) -> dict[str, str]:
    """Return the number of failures that the page shows for each code."""
    cards = page.locator("[data-code]").all()
    return {str(c.get_attribute("data-code")): c.locator(".count").inner_text() for c in cards}


def test_what_failed_is_shown_by_code_while_a_large_batch_runs_and_after(
    chrome: Browser, stack: Stack
) -> None:
    unknown = lines([""] * 3, frobnicate=1)
    invalid = lines([""] * 2, temperature=9).replace(b'"request-', b'"hot-')
    good = lines([*[""] * 310, *["simulate:sleep=600"] * 2]).replace(b'"request-', b'"good-')
    batch_id = send(stack, b"\n".join((unknown, invalid, good)))
    eventually(lambda: stack.client.batches.retrieve(batch_id).request_counts.completed == 310, 60)
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
        assert counts(page) == {"unknown_field": "3", "invalid_request": "2"}
        card = page.locator("[data-code=unknown_field]")
        assert card.locator("li").count() == 3
        assert "frobnicate" in card.inner_text()
        assert view.axe() == []
        card.locator("a").first.click()
        page.wait_for_url("**/request?id=request-*")
        assert "unknown_field" in page.locator("main").inner_text()
        page.goto(f"{stack.gateway.url}/ui")
        assert "5 lines failed in the last 24 hours: 3 unknown_field, 2 invalid_request" in (
            page.locator(".summary").inner_text()
        )
        stack.client.batches.cancel(batch_id)
        ended(stack, batch_id)
        page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
        assert counts(page) == {"unknown_field": "3", "invalid_request": "2", "cancelled": "2"}
        # Wrong lines stay wrong: only what was cancelled can run again
        page.get_by_role("button", name="Retry as a new batch: 2").click()
        page.get_by_text("2 requests are queued again.").wait_for()
        made = page.url.rpartition("/")[2].partition("?")[0]
        eventually(lambda: stack.client.batches.retrieve(made).request_counts.total == 2, 30)
        stack.client.batches.cancel(made)
        ended(stack, made)
        assert view.said == []


def test_no_retry_is_offered_where_every_line_is_wrong(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    over_http = send(stack, lines([""] * 4, frobnicate=1))
    ended(stack, over_http)
    file = tmp_path / "bad.jsonl"
    twice = lines([""]).replace(b"request-0", b"twice")
    without_id = b'{"prompt": "x", "frobnicate": 1}'
    file.write_bytes(b"\n".join((lines([""] * 3, frobnicate=1), without_id, twice, twice)))
    run_producer("submit", file, "--batch-id", "bad", "--model", "small", "--wait",
                 redis_url=stack.redis.url)  # fmt: skip
    with watched(chrome) as view:
        for batch_id in (over_http, "bad"):
            view.page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
            assert counts(view.page)["unknown_field"] == "4"
            assert view.page.get_by_role("button", name="Retry").count() == 0
            assert "a retry does not change" in view.page.locator("main").inner_text()
        address = view.page.url
        view.page.locator("[data-code] li a", has_text="line-4").click()  # it has no custom_id
        view.page.wait_for_url("**/request?id=line-4")
        assert "unknown_field" in view.page.locator("main").inner_text()
        view.page.goto(address)
        view.page.locator("[data-code=duplicate_custom_id] a").click()  # not its namesake
        view.page.wait_for_url("**/request?id=twice&line=6")
        assert "duplicate_custom_id" in view.page.locator("main").inner_text()
        assert view.said == []


def test_a_cancelled_batch_of_submit_says_how_many_requests_a_retry_runs(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 7)
    url = stack.redis.url
    run_producer("submit", file, "--batch-id", "off", "--model", "gpt-5", redis_url=url)
    run_producer("cancel", "off", redis_url=url)
    with watched(chrome) as view:
        view.page.goto(f"{stack.gateway.url}/ui/batches/off")
        assert counts(view.page) == {"cancelled": "7"}
        name = "Retry cancelled or expired requests: 7"
        view.page.get_by_role("button", name=name).click()
        view.page.get_by_text("7 requests are queued again.").wait_for()
        assert view.said == []
    run_producer("delete", "off", "--force", redis_url=url)


def test_a_model_without_a_worker_is_a_stall_on_both_pages_until_it_is_none(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 5)
    url = stack.redis.url
    run_producer("submit", file, "--batch-id", "other", "--model", "gpt-4", redis_url=url)
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches/other")
        stall = page.locator("[data-stall=queue_unserved]")
        assert "gpt-4" in stall.inner_text()
        assert "Start a worker for it" in stall.inner_text()
        assert "0.0 ms" not in page.locator("main").inner_text()
        page.goto(f"{stack.gateway.url}/ui")
        expect(stall).to_be_visible()
        assert "1 batch waits: gpt-4" in page.locator(".summary").inner_text()
        row = page.locator("[aria-labelledby=h-waiting] tbody tr", has_text="gpt-4")
        assert row.locator(".n").inner_text() == "5"
        expect(page.locator("#pulse")).to_have_class("pulse on", timeout=15_000)
        expect(page.locator('[data-f="out_s"]')).to_have_text("0", timeout=15_000)
        assert page.locator('[data-f="waiting"]').inner_text() == "5"
        assert view.axe() == []
        status = run_producer("status", "other", redis_url=url).stdout
        assert stall.locator("strong").inner_text()[1:] in status
        run_producer("delete", "other", "--force", redis_url=url)
        expect(stall).to_have_count(0, timeout=90_000)
        # Whatever else the open page has, what begins to wait is on it
        rates = page.get_by_text("Rates are means of")
        expect(rates).to_have_text("Rates are means of the last 10 seconds.")
        run_producer("submit", file, "--batch-id", "other", "--model", "gpt-4", redis_url=url)
        expect(stall).to_be_visible(timeout=30_000)
        expect(rates).to_have_count(1)
        run_producer("delete", "other", "--force", redis_url=url)
        assert view.said == []


#: Notes each state of the open overview: workers, their slots, a worker's row, the summary.
NOTE_STATES = """() => {
  window.states = new Set();
  const text = (query) => document.querySelector(query)?.textContent.trim() ?? "";
  setInterval(() => window.states.add(JSON.stringify([
    text('[data-f="workers"]'), text('[data-f="slots"]'),
    text('[data-worker="celery@q.7.1"] .status'),
    text('[data-worker="celery@q.7.1"] [data-w="fill"]'),
    text(".summary").includes("has no worker that is ready"),
    document.querySelectorAll("[data-stall=workers_silent]").length])), 20);
}"""


def test_open_pages_show_a_silent_worker_at_once_and_as_one_state(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    client, url, queue = client_of(stack.store), stack.redis.url, "warmq.quiet"
    up_for_long(stack.store)
    file = batch_file(tmp_path / "in.jsonl", 400)
    run_producer("submit", file, "--batch-id", "hush", "--model", "quiet", redis_url=url)
    minute = stack.store.now_ms() // 60_000 - 1
    client.hset(f"warmq:ring:{queue}", str(minute % DAY), f"{minute} 60 0 1200 1200 0 240 240")
    with watched(chrome) as view, watched(chrome) as other:
        # Given a worker whose last announcement is overdue in ten seconds
        announce(stack.store, "celery@q.7.1", queue=queue, slots=4, in_flight=3, silent_s=-8)
        silent_at = time.monotonic() + 10.5
        view.page.goto(f"{stack.gateway.url}/ui")
        view.page.evaluate(NOTE_STATES)
        other.page.goto(f"{stack.gateway.url}/ui/batches/hush")
        left = other.page.locator('[data-b="left"]').first
        expect(left).not_to_have_text("–")
        # When no more comes
        stall = "[data-stall=workers_silent]"
        for each in (view, other):
            told = each.page.locator(stall)
            expect(told).to_contain_text("Worker celery@q (process 7) of", timeout=30_000)
        # Then both pages have it within ten seconds, and no time left
        assert time.monotonic() - silent_at < 10
        assert left.inner_text() == "–"
        states = {tuple(orjson.loads(one)) for one in view.page.evaluate("[...window.states]")}
        assert states == {
            ("2", "3 / 8", "ready", "3 / 4", False, 0), ("1", "0 / 4", "silent", "0 / 4", True, 1),
        }  # fmt: skip
        assert view.said == other.said == []
    client.hdel(keys.WORKERS, "celery@q.7.1")
    run_producer("delete", "hush", "--force", redis_url=url)


def test_a_submit_that_broke_off_is_a_stall_and_has_no_time_left(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    client, url = client_of(stack.store), stack.redis.url
    file = batch_file(tmp_path / "in.jsonl", 5)
    run_producer("submit", file, "--batch-id", "cut", "--model", "small", "--wait", redis_url=url)
    key = keys.batch_key("cut")  # as a submit leaves it whose input ended with an error
    client.hdel(key, "sealed", "finished_at")
    client.hset(key, "lines_at", stack.store.now_ms() - 60_000)
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches/cut")
        stall = page.locator("[data-stall=submit_stopped]")
        assert "--batch-id cut" in stall.inner_text()
        expect(page.locator("#pulse")).to_have_class("pulse on", timeout=15_000)
        rate = page.locator('[data-b="rate"]').first
        expect(rate).to_have_text("0", timeout=15_000)  # not the mean since it began
        assert page.locator('[data-b="left"]').first.inner_text() == "–"
        page.goto(f"{stack.gateway.url}/ui")
        expect(stall).to_be_visible()
        assert view.said == []
    client.delete(key)


def test_the_overview_says_when_a_running_batch_is_done(chrome: Browser, stack: Stack) -> None:
    # Given a worker whose history has what it did
    ended(stack, send(stack, lines(["simulate:sleep=0.5"] * 60)))
    reads = HistoryReads.using(stack.store)
    eventually(lambda: sum(m.busy_s for m in reads.day([QUEUE], 3)) > 20, 60, "it is written")
    # When a batch runs
    batch_id = send(stack, lines(["simulate:sleep=0.5"] * 480))
    eventually(lambda: stack.client.batches.retrieve(batch_id).request_counts.completed, 60)
    with watched(chrome) as view:
        view.page.goto(f"{stack.gateway.url}/ui")
        told = view.page.locator(".summary")
        assert re.search(r"1 batch runs, done about \d\d:\d\d\.", told.inner_text())
        at = dt.datetime.fromisoformat(str(told.locator("time").get_attribute("datetime")))
        assert 0 < at.timestamp() - time.time() < 300
        assert view.said == []
    stack.client.batches.cancel(batch_id)
    ended(stack, batch_id)


def test_the_overview_begins_with_the_rates_of_the_last_minute(
    chrome: Browser, stack: Stack
) -> None:
    now = stack.store.now_ms() // 60_000
    for minute in (now - 1, now):  # one of them is the last whole minute
        sums = f"{minute} 60 0 600 1200 300 60 240"
        client_of(stack.store).hset(f"warmq:ring:{QUEUE}", str(minute % DAY), sums)
    with watched(chrome, java_script_enabled=False) as view:
        view.page.goto(f"{stack.gateway.url}/ui")
        names = ("out_s", "in_s", "cached", "requests_s")
        shown = [view.page.locator(f'[data-f="{name}"]').inner_text() for name in names]
        assert shown == ["20", "10", "50.0 %", "1"]


def test_a_full_redis_is_a_stall_until_it_has_room(chrome: Browser, stack: Stack) -> None:
    client = client_of(stack.store)
    with watched(chrome) as view:
        page = view.page
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        try:
            page.goto(f"{stack.gateway.url}/ui")
            stall = page.locator("[data-stall=memory_full]")
            assert "maxmemory" in stall.inner_text()
            assert "producer delete" in stall.inner_text()
        finally:
            client.config_set("maxmemory", 0)
        page.goto(f"{stack.gateway.url}/ui")
        expect(stall).to_have_count(0)
        assert view.said == []


def test_cut_answers_are_counted_with_the_command_that_runs_them_again(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    file, url = batch_file(tmp_path / "in.jsonl", 5), stack.redis.url
    run_producer("submit", file, "--batch-id", "cut", "--model", "cutter", redis_url=url)
    lessee, endings = Lessee(client_of(stack.store), queue="warmq.cutter"), []
    body = answer("a beginn")
    body["choices"][0]["finish_reason"] = "length"
    for lease in lessee.pop(3):
        it = read_delivery(lease.id, lease.message)
        endings.append(Ending(it, "completed", success_meta(it, orjson.dumps(body), {}), cut=True))
    lessee.run("done", lessee.worker, 60_000, *done_arguments(endings))
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches/cut")
        cut = page.locator("[data-cut]")
        assert cut.get_attribute("data-cut") == "3"
        assert "producer retry cut --cut" in cut.inner_text()
        assert page.get_by_role("heading", name="Failed requests").count() == 0
        # The results have no times, so there are only the tokens
        assert page.locator("[aria-labelledby=h-how] figure").count() == 1
        assert view.said == []
    run_producer("delete", "cut", "--force", redis_url=url)
