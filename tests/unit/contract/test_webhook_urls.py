"""Which hosts of a webhook's URL surely have no public address."""

from __future__ import annotations

import pytest

from contract.webhooks import is_private


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "10.0.0.8:8080", "192.168.1.1", "169.254.169.254",
        "[::1]:80", "[fe80::1]", "[::ffff:10.0.0.1]", "localhost", "LOCALHOST.:1", "a.localhost",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_and_localhost_are_private(host: str) -> None:
    assert is_private(f"http://{host}/hook")


@pytest.mark.parametrize(
    "host", ["93.184.215.14", "[2606:2800:21f:cb07::1]", "example.org", "intranet", "a" * 70]
)
def test_names_are_not_resolved(host: str) -> None:
    assert not is_private(f"https://{host}/hook")
