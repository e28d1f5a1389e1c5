"""Which Redis the tests start: the one that is named, and never another in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.stack import bundled_redis, chosen_redis, redis_binary

VARIABLE = "WARMQ_TEST_REDIS_SERVER"


def test_the_named_server_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, bundled_redis())
    assert chosen_redis() == redis_binary() == bundled_redis()


def test_a_named_server_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "valkey-server"))
    with pytest.raises(FileNotFoundError, match=r"WARMQ_TEST_REDIS_SERVER .*valkey-server"):
        redis_binary()


def test_nothing_is_chosen_where_no_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen_redis() is None
    assert Path(redis_binary()).exists()
