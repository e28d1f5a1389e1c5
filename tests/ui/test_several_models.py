"""The page of workers with several models: loaded ones, swaps, those that cannot be loaded."""

from __future__ import annotations

import time
from typing import Any

from kit.commands.doctor_findings import announce
from kit.gateways.browser import watched
from kit.gateways.live_stack import Stack
from kit.protocol.lessee import submit_batch
from playwright.sync_api import Browser, expect

MODELS = {name: f"warmq.{name}" for name in ("chat", "judge", "broken")}


def say(stack: Stack, **more: Any) -> None:
    """Announce a worker that has swapped from `judge` to `chat`."""
    swap = {"from": "judge", "to": "chat", "why": "an online request waits 31 s",
            "at": int(time.time() * 1000), "seconds": 12.5}  # fmt: skip
    failed = {"broken": {"why": "/models/broken is no folder", "tries": 2, "again_at": 0}}
    told: dict[str, Any] = {"queue": "warmq.chat", "model": "chat", "models": MODELS,
                            "swaps": [swap], "unloadable": failed, "slots": 4,
                            "sleep_failed": {"judge": "it leaks"}}  # fmt: skip
    announce(stack.store, "several", **(told | more))


def test_a_card_says_which_model_is_loaded_and_which_swap_was_last(
    chrome: Browser, stack: Stack
) -> None:
    say(stack)
    submit_batch(stack.store, 3, batch_id="sleeps", queue="warmq.judge")
    submit_batch(stack.store, 2, batch_id="fails", queue="warmq.broken")
    with watched(chrome) as view:
        page = view.page
        page.goto(f"{stack.gateway.url}/ui/workers")
        card = page.locator('[data-worker="several"]')
        for text in ("chat (loaded)", "judge (not loaded)", "broken (cannot be loaded)"):
            expect(card).to_contain_text(text)
        expect(card.locator("[data-unloadable=broken]")).to_contain_text("is no folder")
        expect(card).to_contain_text("it leaks")
        card.get_by_text("Last swaps").click()
        expect(card.locator(".swaps li")).to_contain_text(
            "judge → chat, 12 s: an online request waits 31 s"
        )
        assert view.axe() == []
        page.goto(f"{stack.gateway.url}/ui")
        expect(page.locator("[data-stall=model_not_loaded]")).to_contain_text("judge")
        expect(page.locator("[data-stall=model_unloadable]")).to_contain_text("is no folder")
        model = page.locator('[data-worker="several"] [data-w=model]')
        expect(model).to_have_text("chat")
        say(stack, queue="warmq.judge", model="judge", swaps="not a list")
        expect(model).to_have_text("judge")  # the page follows a swap
        assert view.said == []
