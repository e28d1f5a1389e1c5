"""What moves on the pages, in a real browser: bars, rates, texts; and what buttons do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import orjson
import pytest
from kit.commands.doctor_findings import announce
from kit.commands.runs import running
from kit.commands.support import producer_command, producer_env
from kit.gateways.browser import watched
from kit.gateways.live_stack import MODEL, QUEUE, Stack
from kit.gateways.page_stack import ended, lines, send
from playwright.sync_api import Browser, Page, expect

from contract import naming
from contract.redis import keys
from contract.redis.history import HistoryReads
from demo.stack import eventually


def committed(stack: Stack) -> int:
    """Return how many results there are."""
    return sum(1 for _ in stack.store._client.scan_iter("celery-task-meta-*", count=10_000))


def test_a_file_is_uploaded_planned_started_and_its_bar_moves_until_it_has_ended(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(lines(["simulate:sleep=0.4"] * 60))
    with watched(chrome, accept_downloads=True) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/submit")
        page.set_input_files("#file", file)
        page.get_by_role("button", name="Upload and plan").click()
        page.wait_for_url("**/ui/submit?file=file-*")
        assert page.locator(".stat", has_text="Requests").first.locator("dd").inner_text() == "60"
        assert view.axe() == []
        page.get_by_role("button", name="Start").click()
        page.wait_for_url("**/ui/batches/batch_*")
        expect(page.locator("#pulse")).to_have_class("pulse on", timeout=15_000)
        done = page.locator('[data-b="done"]').first
        width = '() => Number(document.querySelector(".bar-done").getAttribute("width"))'
        first = eventually(lambda: page.evaluate(width), 30, "the bar begins")
        eventually(lambda: page.evaluate(width) > first, 30, "the bar moves")
        expect(page.locator(".status-completed").first).to_be_visible(timeout=60_000)
        expect(page.locator(".notice")).to_have_count(0)
        expect(done).to_have_text("60")
        with page.expect_download() as got:
            page.get_by_role("link", name="Answers").click()
        answers = [orjson.loads(one) for one in Path(got.value.path()).read_bytes().splitlines()]
        assert len({answer["custom_id"] for answer in answers}) == 60
        assert view.said == []


def test_a_result_is_on_the_page_without_a_new_load(chrome: Browser, stack: Stack) -> None:
    batch_id = send(stack, lines([*["simulate:sleep=3"] * 4, *["simulate:sleep=600"] * 2]))
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
        expect(page.locator("#pulse")).to_have_class("pulse on", timeout=15_000)
        before = committed(stack)
        eventually(lambda: committed(stack) > before, 30, "a result is in Redis")

        def shown() -> bool:
            return page.locator('[data-b="done"]').first.inner_text() != "0"

        eventually(shown, 30, "it is shown")
    stack.client.batches.cancel(batch_id)
    ended(stack, batch_id)


def test_a_batch_is_cancelled_by_its_button_after_a_question(chrome: Browser, stack: Stack) -> None:
    batch_id = send(stack, lines(["simulate:sleep=600"] * 3))
    eventually(lambda: stack.client.batches.retrieve(batch_id).status == "in_progress", 20)
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
        page.once("dialog", lambda dialog: dialog.dismiss())
        page.get_by_role("button", name="Cancel").click()
        assert stack.client.batches.retrieve(batch_id).status == "in_progress"
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Cancel").click()
        page.get_by_text("The batch is being cancelled.").wait_for()
        expect(page.locator(".status-cancelled").first).to_be_visible(timeout=30_000)
        expect(page.locator(".notice")).to_have_count(0, timeout=30_000)
        assert view.said == []


def test_failed_lines_run_again_as_a_batch_of_their_own(chrome: Browser, stack: Stack) -> None:
    batch_id = send(stack, lines(["simulate:fail" if n in (1, 4) else "" for n in range(6)]))
    assert ended(stack, batch_id).request_counts.failed == 2
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
        assert "Retry it" in page.locator("[data-code]").inner_text()
        assert page.locator("[data-code] li a").all_inner_texts() == ["request-1", "request-4"]
        page.get_by_role("button", name="Retry as a new batch: 2").click()
        page.get_by_text("2 requests are queued again.").wait_for()
        made = page.url.rpartition("/")[2].partition("?")[0]
        assert made != batch_id
        assert ended(stack, made).request_counts.total == 2
        assert view.said == []


def test_the_text_of_a_request_appears_while_it_is_written(chrome: Browser, stack: Stack) -> None:
    batch_id = send(stack, lines(["simulate:sleep=8"]))
    with watched(chrome) as view:
        page = view.page

        def runs() -> bool:
            page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
            return page.locator(".chips a").count() > 0

        eventually(runs, 30, "the page names a request that runs", every_s=0.2)
        page.locator(".chips a").first.click()
        page.wait_for_url("**/request?id=request-0")
        assert page.locator(".status-running").count() == 1
        expect(page.locator("#live-text")).to_have_text("simulated ", timeout=20_000)
        expect(page.locator(".status-completed")).to_be_visible(timeout=30_000)
        text = page.locator("#live-text").inner_text()
        assert len(text) > len("simulated ")
        assert view.said == []


def test_what_runs_and_what_ended_last_are_read_again(chrome: Browser, stack: Stack) -> None:
    batch_id = send(stack, lines(["simulate:sleep=4", "simulate:sleep=16"]))
    with watched(chrome) as view:
        page = view.page

        def both_run() -> bool:
            page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
            return page.locator(".chips a").count() == 2

        eventually(both_run, 30, "the page names both requests", every_s=0.2)
        page.evaluate("window.loadedOnce = true")
        assert page.locator("table.requests").count() == 0
        expect(page.locator("table.requests")).to_contain_text("request-0", timeout=30_000)
        expect(page.locator(".chips a")).to_have_text(["request-1"])
        assert page.evaluate("window.loadedOnce")
        assert view.said == []


def test_the_open_overview_shows_a_batch_that_begins(chrome: Browser, stack: Stack) -> None:
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui")
        page.evaluate("window.loadedOnce = true")
        batch_id = send(stack, lines(["simulate:sleep=12"]))
        row = page.locator(f'tr[data-batch="{batch_id}"]')
        expect(row).to_be_visible(timeout=30_000)
        expect(page.locator(".summary")).to_contain_text("run")
        assert page.evaluate("window.loadedOnce")
        assert view.said == []


def test_the_open_page_of_workers_has_those_that_come_and_go(chrome: Browser, stack: Stack) -> None:
    swap = {"from": "a", "to": "b", "why": "it waits", "at": 1000, "seconds": 2.5}
    announce(stack.store, "first", swaps=[swap])
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/workers")
        page.evaluate("window.loadedOnce = true")
        opened = page.locator("[data-worker=first] details")
        opened.locator("summary").click()
        announce(stack.store, "another", swaps=[swap | {"why": "it is asked for"}])
        card = page.locator("[data-worker=another]")
        expect(card).to_contain_text("it is asked for", timeout=30_000)
        announce(stack.store, "another", why="its GPU is away")
        expect(card).to_contain_text("its GPU is away", timeout=30_000)
        expect(opened).to_contain_text("it waits")
        assert opened.get_attribute("open") is not None
        stack.store._client.hdel(keys.WORKERS, "another")
        expect(card).to_have_count(0, timeout=30_000)
        assert opened.get_attribute("open") is not None
        assert page.evaluate("window.loadedOnce")
        assert view.said == []
    stack.store._client.hdel(keys.WORKERS, "first")


def test_an_open_filtered_list_has_a_batch_that_begins(chrome: Browser, stack: Stack) -> None:
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches?text=begins-later")
        page.evaluate("window.loadedOnce = true")
        assert page.locator("tr[data-batch]").count() == 0
        batch_id = send(stack, lines(["simulate:sleep=600"]), "begins-later.jsonl")
        expect(page.locator(f'tr[data-batch="{batch_id}"]')).to_be_visible(timeout=70_000)
        assert page.evaluate("window.loadedOnce")
        assert view.said == []
    stack.client.batches.cancel(batch_id)
    ended(stack, batch_id)


def test_the_mark_of_a_run_that_reads_more_goes_with_its_explanation(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = orjson.dumps({"prompt": "Hi", "user": "simulate:sleep=600", "model": MODEL})
    source.write_bytes(b"\n".join([line] * 1100))
    with running(stack.redis.url, source, out, "--model", MODEL, "--window", "500") as process:

        def run() -> str:
            batches = httpx.get(f"{stack.gateway.url}/v1/batches").json()["data"]
            found = [b for b in batches if (b["metadata"] or {}).get("input") == str(source)]
            return found[0]["id"] if found and found[0]["request_counts"]["total"] == 1000 else ""

        batch_id = str(eventually(run, 30, "the run has queued two windows"))
        with watched(chrome) as view:
            page = view.page
            page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
            page.evaluate("window.loadedOnce = true")
            total = page.locator("[data-b=total]")
            note = page.get_by_text("+: the run may read more lines")
            expect(total).to_have_text("1,000+")
            expect(note).to_be_visible()
            stack.store._client.hset(keys.batch_key(batch_id), "unread", 0)
            expect(total).to_have_text("1,000", timeout=30_000)
            expect(note).to_have_count(0, timeout=30_000)
            assert page.evaluate("window.loadedOnce")
            assert view.said == []
        stack.client.batches.cancel(batch_id)
        assert process.wait(30) == 1


def tiles(page: Page) -> dict[str, str | None]:
    """Return the value that stands under each label."""
    found = page.locator(".stat").all()
    return {
        one.locator("dt").inner_text(): one.locator("dd").first.get_attribute("data-b")
        for one in found
    }


def test_the_open_page_of_an_ended_batch_shows_that_it_goes_on(
    chrome: Browser, stack: Stack, tmp_path: Path
) -> None:
    source = tmp_path / "again.jsonl"
    line = orjson.dumps({"prompt": "Hi", "user": "simulate:sleep=600", "model": MODEL})
    source.write_bytes(b"\n".join([line] * 3))

    def producer(*words: str | Path) -> None:
        env = producer_env(stack.redis.url)
        subprocess.run(producer_command(*words), env=env, check=True, timeout=60)

    producer("submit", source, "--batch-id", "again", "--model", MODEL)
    producer("cancel", "again")
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/batches/again")
        page.evaluate("window.loadedOnce = true")
        heading = page.locator('[data-b="status"]')
        expect(heading).to_have_text("cancelled", timeout=30_000)
        expect(page.get_by_role("button", name="Retry cancelled or expired")).to_be_visible()
        expect(page.locator("#pulse")).to_have_class("pulse on", timeout=15_000)
        producer("retry", "again", "--include", "cancelled")
        expect(heading).to_have_text("in progress", timeout=30_000)
        expect(page.get_by_role("button", name="Retry cancelled or expired")).to_have_count(0)
        expect(page.locator(".stat", has_text="Left")).to_have_count(1)
        expect(page.get_by_role("button", name="Cancel")).to_be_visible()
        rates = page.get_by_text("mean of the last 30 seconds")
        expect(rates).to_be_visible(timeout=30_000)
        expected = {"Of": "total", "Requests/s": "rate", "Tokens in": "tokens_in"}
        assert tiles(page).items() >= (expected | {"Left": "left"}).items()
        producer("cancel", "again")
        expect(heading).to_have_text("cancelled", timeout=30_000)
        assert tiles(page).items() >= (expected | {"Took": "left", "Cancelled": None}).items()
        expect(page.locator('[data-b="rate"]')).to_have_text("–", timeout=30_000)
        expect(rates).to_have_count(0)
        assert page.evaluate("window.loadedOnce")
        assert view.said == []


def test_dead_letters_are_queued_again_and_deleted(chrome: Browser, stack: Stack) -> None:
    client = stack.store._client
    for _ in range(3):  # no Celery message: nobody can read it
        client.lpush(naming.queue_name("small"), b"not a message")
    eventually(lambda: client.hlen(keys.DEAD) == 3, 30, "three dead letters")
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/dead")
        page.locator("details summary").first.click()
        assert "not a message" in page.locator("main").inner_text()
        assert view.axe() == []
        page.get_by_role("button", name="Queue again").click()
        page.get_by_text("Nothing is selected.").wait_for()
        page.locator('input[name="id"]').first.check()
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete").click()
        page.get_by_text("1 dead letters deleted.").wait_for()
        page.get_by_label("All", exact=True).check()
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete").click()
        page.get_by_text("No dead letters").wait_for()
        assert view.said == []
    assert client.hlen(keys.DEAD) == 0


def test_nothing_is_read_from_redis_while_nobody_looks(chrome: Browser, tmp_path: Path) -> None:
    with Stack(tmp_path, worker=False) as own:
        client = own.store._client

        def calls() -> int:
            """Return how often somebody has read the announcements; no worker runs."""
            return int(client.info("commandstats").get("cmdstat_hgetall", {}).get("calls", 0))

        with watched(chrome) as view:
            view.page.goto(f"{own.gateway.url}/ui/workers")
            before = calls()
            eventually(lambda: calls() > before + 3, 30, "what is looked at while somebody looks")

        # The browser has gone: soon there are two moments, further apart than two looks, between
        # which nobody has read.
        def quiet() -> bool:
            before = calls()
            return not until(lambda: calls() > before, 5.0)

        eventually(quiet, 60, "nobody reads any more", every_s=0.5)


def until(look: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether something becomes so within this time."""
    try:
        return eventually(look, timeout_s, every_s=0.2)
    except TimeoutError:
        return False


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_stream_says_when_redis_is_away_and_when_it_is_back(
    chrome: Browser, tmp_path: Path, language: str
) -> None:
    with Stack(tmp_path, worker=False) as own, watched(chrome, language=language) as view:
        view.page.goto(f"{own.gateway.url}/ui/workers")
        expect(view.page.locator("#pulse")).to_have_class("pulse on", timeout=15_000)
        own.redis.stop()
        expect(view.page.locator("#pulse")).to_have_class("pulse off", timeout=30_000)
        own.redis.start()
        expect(view.page.locator("#pulse")).to_have_class("pulse on", timeout=30_000)


def test_a_batch_shows_what_was_planned_of_its_time(chrome: Browser, stack: Stack) -> None:
    # By the minutes in which requests have ended a plan has a time.
    ended(stack, send(stack, lines(["simulate:sleep=0.2"] * 60)))

    def is_measured() -> bool:
        return any(minute.completed for minute in HistoryReads.using(stack.store).day([QUEUE]))

    eventually(is_measured, 60, "the worker has measured")
    batch_id = send(stack, lines(["simulate:sleep=0.2"] * 40))
    ended(stack, batch_id)
    with watched(chrome) as view:
        view.page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}")
        assert "planned" in view.page.locator("main").inner_text()
        view.page.goto(f"{stack.gateway.url}/ui/batches")
        row = view.page.locator(f'[data-batch="{batch_id}"]')
        assert "planned" in row.inner_text()
        assert view.said == []


def test_an_attempt_that_a_worker_gave_back_is_told_with_the_worker(
    chrome: Browser, stack: Stack
) -> None:
    batch_id = send(stack, lines(["simulate:sleep=600"]))

    def part() -> str:
        running = stack.client.batches.retrieve(batch_id).status == "in_progress"
        return f"{batch_id}" if running else ""

    eventually(part, 20, "it runs")
    request_id = naming.request_id(batch_id, "request-0")
    told = b"%d\0somebody@host\0died" % stack.store.now_ms()
    stack.store._client.lpush(keys.attempts_key(request_id), told)
    with watched(chrome) as view:
        view.page.goto(f"{stack.gateway.url}/ui/batches/{batch_id}/request?id=request-0")
        main = view.page.locator("main")
        assert "somebody@host" in main.inner_text()
        assert "its engine died" in main.inner_text()
        assert view.axe() == []
    stack.client.batches.cancel(batch_id)
    ended(stack, batch_id)
