"""`producer webhooks create`, and where the webhook cannot be delivered."""

from __future__ import annotations

import pytest
from kit.commands.support import run_producer

SETTING = "WARMQ_GATEWAY_PRIVATE_WEBHOOKS=true"


@pytest.mark.parametrize(
    ("url", "warned"),
    [("http://127.0.0.1:7399/hook", True), ("https://example.org/hook", False)],
)
def test_create_names_the_setting_that_a_private_host_needs(
    redis_url: str, url: str, warned: bool
) -> None:
    done = run_producer("webhooks", "create", "--url", url, redis_url=redis_url)
    assert done.returncode == 0
    assert (SETTING in done.stderr, "gateways" in done.stderr) == (warned, warned)
    assert len(done.stdout.splitlines()) == 1
