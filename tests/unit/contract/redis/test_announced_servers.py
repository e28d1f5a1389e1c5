"""What readers find of servers that workers announce as shared with people."""

from __future__ import annotations

from typing import Any

import pytest

from contract.redis.announced_servers import SharedServer, shared_servers

ROW = {
    "server": "host:8000", "in_flight": 12, "in_server": 30, "limit": 24, "workers": 2,
    "why": "nobody is slower", "paused": False, "nobody_else": False, "ttft_ms": 30.1,
    "ttft_ms_target": 66.0, "itl_ms": 8.0, "itl_ms_target": 16.2, "tokens_today": 1203,
}  # fmt: skip
READ = SharedServer(
    "host:8000", 12, 30, 24, 2, "nobody is slower", False, 30.1, 66.0, 8.0, 16.2, 1203
)


def worker(*rows: object, silent_s: float = 0.5) -> dict[str, Any]:
    return {"id": "w", "silent_s": silent_s, "shared": list(rows)}


def test_each_server_is_there_once_from_its_latest_announcement() -> None:
    old, new = worker(ROW | {"limit": 99}, silent_s=3.0), worker(ROW)
    other = worker(ROW | {"server": "a:1"})
    found = shared_servers([new, other, old])
    assert [one.server for one in found] == ["a:1", "host:8000"]
    assert found[1] == READ


def test_the_servers_requests_are_no_fewer_than_ours() -> None:
    (found,) = shared_servers([worker(ROW | {"in_server": 3})])
    assert found.in_server == 12
    (found,) = shared_servers([worker(ROW | {"in_server": None})])
    assert found.in_server is None


@pytest.mark.parametrize("junk", [None, "x", True, -1, float("nan"), 1e30, [1], {}])
def test_values_that_cannot_be_read_are_unknown(junk: object) -> None:
    row = dict.fromkeys(ROW, junk) | {"server": "host:8000", "why": "x", "paused": junk}
    (found,) = shared_servers([worker(row)])
    assert (found.in_flight, found.in_server, found.limit, found.tokens_today) == (0, None, 0, 0)
    assert (found.ttft_ms, found.itl_ms_target) == (None, None)
    assert found.paused is (junk is True)


@pytest.mark.parametrize("shared", [None, 1, "x", [1], [{"server": 5}], [{}], {"server": "x"}])
def test_rows_that_are_none_are_passed_over(shared: object) -> None:
    assert shared_servers([{"id": "w", "silent_s": 0.1, "shared": shared}]) == []
    assert shared_servers([{"id": "w", "silent_s": 0.1}]) == []
