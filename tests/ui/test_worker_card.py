"""A worker's card: its rate, the memory of its machine, and the last lines of its log."""

from __future__ import annotations

import httpx
import orjson
from kit.gateways.browser import Watched, watched
from kit.gateways.live_stack import QUEUE, Stack
from kit.gateways.page_stack import ended, lines, send
from playwright.sync_api import Browser, expect

from contract.redis import keys
from demo.stack import eventually
from gateway.redis.api_keys import ApiKeys


def test_a_card_has_rate_memory_and_the_last_log_lines_without_prompts(
    chrome: Browser, stack: Stack
) -> None:
    batch_id = send(stack, lines(["simulate:sleep=0.5"] * 40 + ["simulate:fail"]))
    with watched(chrome) as view:
        view.page.goto(f"{stack.gateway.url}/ui/workers")
        rate = view.page.locator('[data-w="out_s"]').first
        eventually(lambda: rate.inner_text() not in ("–", "0"), 30, "it has a rate")
        ended(stack, batch_id)

        def told() -> str:
            view.page.goto(f"{stack.gateway.url}/ui/workers")
            card = view.page.locator(".worker").first
            return card.inner_text() if "Host memory" in card.inner_text() else ""

        assert " GB / " in str(eventually(told, 30, "the worker has reported"))
        view.page.get_by_text("Last log lines").first.click()
        log = view.page.locator(".log").first
        expect(log).to_contain_text("INFO")
        assert "What is" not in log.inner_text()
        assert view.axe() == [] and view.said == []
    (worker,) = stack.store.workers(QUEUE)
    raw = stack.store._client.get(keys.machine_key(worker["id"]))
    assert len(raw) < 6000
    assert 0 < stack.store._client.pttl(keys.machine_key(worker["id"])) <= 60_000
    assert len(orjson.loads(raw)["log"]) <= 20
    for wrong in (b"not JSON", b"[]", b'{"host": "x"}'):
        stack.store._client.set(keys.machine_key(worker["id"]), wrong)
        assert httpx.get(f"{stack.gateway.url}/ui/workers").status_code == 200


def test_only_an_operator_sees_the_log(chrome: Browser, stack: Stack) -> None:
    # After this the gateway has keys: it is the last test of the module.
    client, found = stack.store._client, []
    told = {"state": "serving", "queue": "warmq.other", "model": "other"}
    report = {"log": [[1.0, "INFO", "only for operators"]]}
    client.set(keys.machine_key("w2"), orjson.dumps(report))
    for operator in (False, True):
        secret, _ = ApiKeys.using(stack.store).create("mine", operator=operator)
        with watched(chrome) as view:

            def asks(view: Watched = view) -> bool:
                view.page.goto(f"{stack.gateway.url}/ui/workers")
                return view.page.locator("#key").count() == 1

            eventually(asks, 10, "it has keys")
            view.page.fill("#key", secret)
            view.page.keyboard.press("Enter")
            view.page.wait_for_url("**/ui/workers")
            now = b"%d" % stack.store.now_ms()
            client.hset(keys.WORKERS, "w2", now + b"\0" + orjson.dumps(told))
            view.page.goto(f"{stack.gateway.url}/ui/workers")
            assert "w2" in view.page.content()
            found.append("only for operators" in view.page.content())
    assert found == [False, True]
