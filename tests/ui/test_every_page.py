"""Every page in a real browser: it has no severe fault of accessibility, fits a phone, and its
console says nothing, in both themes and languages; what strangers wrote is text and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
import openai
import orjson
import pytest
from kit.gateways.browser import watched
from kit.gateways.live_stack import MODEL, Stack
from kit.gateways.page_stack import ended, lines, pages, send
from playwright.sync_api import Browser

from contract.redis import keys
from demo.stack import eventually
from gateway.redis.api_keys import ApiKeys

#: It would change the title, and say so on the console, wherever it is run.
PAYLOADS = (
    "<script>document.title='owned';console.error('owned')</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "{{ 7 * 7 }}{% raw %}",
    "'-alert(1)-'</title><svg/onload=document.title='owned'>",
)
HOSTILE = "".join(PAYLOADS)


@dataclass
class Shown:
    stack: Stack
    paths: dict[str, str]


@pytest.fixture(scope="module")
def shown(stack: Stack) -> Iterator[Shown]:
    """A batch with answers and failures, and one that runs."""
    fates = ["simulate:fail" if n % 5 == 0 else "" for n in range(40)]
    done = send(stack, lines(fates))
    found = ended(stack, done)
    send(stack, lines(["simulate:sleep=600"] * 2), "slow.jsonl")
    yield Shown(stack, pages(done, "request-3", found.input_file_id))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("language", ["en", "ko"])
def test_no_page_has_a_severe_fault_of_accessibility_and_no_console_says_a_word(
    chrome: Browser, shown: Shown, language: str, dark: bool
) -> None:
    with watched(chrome, dark=dark, language=language) as view:
        for name, path in shown.paths.items():
            view.page.goto(shown.stack.gateway.url + path)
            assert view.page.locator("html").get_attribute("lang") == language
            assert view.axe() == [], (name, path)
        # The page that is not there says so on the console, and nothing else does.
        assert [text for text in view.said if "404 (Not Found)" not in text] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_theme_that_was_chosen_stays_and_is_free_of_faults_too(
    chrome: Browser, shown: Shown, theme: str
) -> None:
    other = theme == "light"
    with watched(chrome, dark=other) as view:
        view.page.goto(f"{shown.stack.gateway.url}/ui?theme={theme}")
        view.page.goto(f"{shown.stack.gateway.url}/ui/batches")
        assert view.page.locator("html").get_attribute("data-theme") == theme
        assert view.axe() == []


@pytest.mark.parametrize("language", ["en", "ko"])
def test_no_page_is_wider_than_a_phone(chrome: Browser, shown: Shown, language: str) -> None:
    with watched(chrome, width=390, height=844, language=language) as view:
        for name, path in shown.paths.items():
            view.page.goto(shown.stack.gateway.url + path)
            assert view.page.evaluate("document.documentElement.scrollWidth") <= 390, name
            assert view.axe() == [], name


def test_all_links_of_the_pages_are_reached_by_the_keyboard_alone(
    chrome: Browser, shown: Shown
) -> None:
    with watched(chrome) as view:
        view.page.goto(shown.stack.gateway.url + "/ui")
        view.page.keyboard.press("Tab")
        assert view.page.evaluate("document.activeElement.className") == "skip"
        for _ in range(3):  # past the brand and the overview
            view.page.keyboard.press("Tab")
        assert view.page.evaluate("document.activeElement.textContent") == "Batches"
        view.page.keyboard.press("Enter")
        view.page.wait_for_url("**/ui/batches")


def test_times_are_those_of_the_viewers_zone(chrome: Browser, shown: Shown) -> None:
    with watched(chrome, timezone_id="Asia/Seoul") as view:
        view.page.goto(shown.stack.gateway.url + "/ui/batches")
        time = view.page.locator("time").first
        eventually(lambda: "UTC" not in time.inner_text(), 20, "the viewer's zone")
        stated = str(time.get_attribute("datetime"))
        hour = (int(stated[11:13]) + 9) % 24
        assert f" {hour:02d}:{stated[14:16]}" in time.inner_text()


def test_script_that_strangers_wrote_is_shown_as_text_on_every_page(
    chrome: Browser, shown: Shown
) -> None:
    stack = shown.stack
    body = {"model": MODEL, "messages": [{"role": "user", "content": HOSTILE}]}
    good = {"custom_id": HOSTILE, "method": "POST", "url": "/v1/chat/completions", "body": body}
    bad = good | {"custom_id": f"bad{HOSTILE}", "body": body | {"model": HOSTILE}}
    fails = good | {"custom_id": f"fails{HOSTILE}", "body": body | {"user": "simulate:fail"}}
    file = b"\n".join(orjson.dumps(line) for line in (good, bad, fails))
    batch_id = send(stack, file, f"{HOSTILE}.jsonl")
    found = ended(stack, batch_id)
    # An answer, a worker's name, its model and reason, and a tenant are others' words as well.
    client = stack.store._client
    ids = [key for key in client.scan_iter("celery-task-meta-*") if b"onerror" in client.get(key)]
    answered = next(key for key in ids if b'"status":"SUCCESS"' in client.get(key))
    meta = orjson.loads(client.get(answered))
    meta["result"]["choices"][0]["message"]["content"] = HOSTILE
    client.set(answered, orjson.dumps(meta))
    told = {"state": "degraded", "queue": HOSTILE, "model": HOSTILE, "why": HOSTILE,
            "version": HOSTILE, "device": HOSTILE, "adapters": [HOSTILE]}  # fmt: skip
    now = b"%d" % stack.store.now_ms()
    client.hset(keys.WORKERS, HOSTILE, now + b"\0" + orjson.dumps(told))
    client.hset(keys.TENANTS, HOSTILE, b"2\0")
    letter = b"\0".join(
        [now, b"10", b"warmq", b"", b"", b"", orjson.dumps(HOSTILE), HOSTILE.encode()]
    )
    client.hset(keys.DEAD, "1", letter)
    client.lpush(keys.dead_key("1"), HOSTILE)
    try:
        paths = pages(batch_id, quote(HOSTILE), found.input_file_id)
        expected = {"overview", "batches", "batch", "request", "workers", "tenants", "dead",
                    "submit", "plan"}  # fmt: skip
        with watched(chrome) as view:
            for name, path in paths.items():
                view.page.goto(stack.gateway.url + path)
                for details in view.page.locator("details").all():
                    details.evaluate("one => { one.open = true }")
                assert view.page.title() != "owned", name
                assert view.page.locator("main script, main [onerror], main [onload]").count() == 0
                if name in expected:
                    assert "<script>document.title" in view.page.locator("main").inner_text(), name
            assert [text for text in view.said if "404 (Not Found)" not in text] == []
    finally:
        client.hdel(keys.WORKERS, HOSTILE)
        client.hdel(keys.TENANTS, HOSTILE)
        client.delete(keys.DEAD, keys.dead_key("1"))


def test_an_empty_gateway_says_on_each_page_what_to_do(
    chrome: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        Stack(tmp_path_factory.mktemp("empty"), worker=False) as empty,
        watched(chrome) as view,
    ):
        for path, command in {
            "/ui": "warmq-worker",
            "/ui/batches": "producer submit",
            "/ui/workers": "warmq-worker",
            "/ui/tenants": "producer tenant set",
            "/ui/dead": "producer dead list",
            "/ui/submit": "producer submit",
        }.items():
            view.page.goto(empty.gateway.url + path)
            assert command in view.page.locator("main").inner_text(), path
            assert view.axe() == [], path
        assert view.said == []


def test_a_key_logs_in_and_its_pages_are_its_tenants(
    chrome: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Stack(tmp_path_factory.mktemp("keys")) as keyed, watched(chrome) as view:
        store = ApiKeys.using(keyed.store)
        mine, _ = store.create("mine")
        others, _ = store.create("others")
        client = openai.OpenAI(base_url=keyed.url, api_key=others, max_retries=2)
        theirs = send(keyed, lines([""] * 3), client=client)
        url = keyed.gateway.url
        view.page.goto(f"{url}/ui/batches/{theirs}")
        view.page.wait_for_url("**/ui/login?next=*")
        assert view.axe() == []
        view.page.fill("#key", "sk-wrong")
        view.page.keyboard.press("Enter")
        view.page.get_by_role("alert").wait_for()
        assert view.axe() == []
        view.page.fill("#key", mine)
        view.page.keyboard.press("Enter")
        view.page.wait_for_url(f"**/ui/batches/{theirs}")
        assert "No such batch" in view.page.locator("main").inner_text()
        assert view.page.evaluate("document.cookie") == ""
        view.page.goto(f"{url}/ui/batches")
        assert theirs not in view.page.content()
        view.page.get_by_role("button", name="Log out").click()
        view.page.wait_for_url("**/ui/login")
        view.page.goto(f"{url}/ui/batches")
        view.page.wait_for_url("**/ui/login?next=*")
        client.close()


@pytest.mark.parametrize("keyed", [False, True], ids=["without keys", "with keys"])
def test_without_redis_the_pages_say_so_and_what_to_do_and_come_back(
    chrome: Browser, tmp_path: Path, keyed: bool
) -> None:
    with Stack(tmp_path, worker=False) as alone, watched(chrome) as view:
        url = alone.gateway.url
        if keyed:
            ApiKeys.using(alone.store).create("mine")
            eventually(lambda: "/login" in str(httpx.get(f"{url}/ui").headers), 10, "it has keys")
        alone.redis.stop()
        eventually(lambda: httpx.get(f"{url}/ui").status_code == 503, 10, "Redis is missed")
        for path in ("/ui", "/ui/batches", "/ui/workers", "/ui/login", "/ui/submit"):
            answer = view.page.goto(url + path)
            assert answer is not None
            assert (answer.status, answer.headers["content-type"][:9]) == (503, "text/html"), path
            told = view.page.locator("main").inner_text()
            assert "The queue does not answer" in told
            assert "producer doctor" in told
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert view.axe() == []
        alone.redis.start()

        def is_back() -> bool:
            answer = view.page.goto(f"{url}/ui/login" if keyed else f"{url}/ui")
            return answer is not None and answer.status == 200

        eventually(is_back, 20, "the pages are back", every_s=0.3)
        assert {text for text in view.said if "503 (Service Unavailable)" not in text} == set()
