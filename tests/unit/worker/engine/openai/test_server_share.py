"""A worker's share of a server: what it reports, and what it does with Redis's answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import aiohttp
import orjson
import pytest

from contract.errors import StoreUnreachable
from worker.engine import RequestReturned
from worker.engine.openai import server_share
from worker.engine.openai.guard import FIRST, Guard
from worker.engine.openai.server_share import Report, ServerShare
from worker.engine.openai.shared import Sharing
from worker.engine.openai.upstream import Upstream
from worker.engine.remote.servers import Servers


class Script:
    """Answers SERVER SHARE with `reply`, or with an error, and notes the arguments."""

    def __init__(self) -> None:
        self.calls: list[Sequence[Any]] = []
        self.reply: dict[str, Any] = {}
        self.error: Exception | None = None
        self.called = asyncio.Event()

    async def run_script(self, name: str, *args: Any) -> list[Any]:
        assert name == "server_share"
        self.calls.append(args)
        self.called.set()
        if self.error is not None:
            raise self.error
        known = {"leads": 1, "limit": -1, "share": 0, "others": 0, "busy": 0, "finished": 0,
                 "today": 0, "shown": b"", "quiet": b""}  # fmt: skip
        return list((known | self.reply).values())


def upstream() -> Upstream:
    session = cast(aiohttp.ClientSession, None)  # no request is sent
    made = Upstream("http://host:8000/v1", session, "m", None)
    made.up, made.model = True, "m"
    return made


def share_of(script: Script, server: Upstream | None = None) -> ServerShare:
    return ServerShare(script, server or upstream())


def sharing_of(script: Script, **settings: float) -> Sharing:
    server = upstream()
    fleet: Servers[Upstream] = Servers(60, None)
    fleet.servers = [server]
    return Sharing(server, Guard(**settings), share_of(script, server), fleet)  # type: ignore[arg-type]


async def renew(sharing: Sharing) -> None:
    """Renew once, as the share's task does."""
    try:
        await sharing.share._renew(sharing._report())
    except StoreUnreachable:
        sharing.share._renewed_at = -1e9
    sharing.share.tried = True
    sharing._renewed()


def second(sharing: Sharing, own: int = 0) -> int:
    """Let a second pass that the server's metrics show nothing of; no task is started."""
    sharing._renewing = cast(Any, sharing)
    sharing._probe = cast(Any, Done())
    limit = sharing.next_limit(None, own)
    sharing._upstream.limit = limit
    return limit


class Done:
    """A probe that never ends, so that no other begins."""

    def done(self) -> bool:
        return False


async def test_a_report_has_what_is_new_since_the_last_answer() -> None:
    script, server = Script(), upstream()
    share = share_of(script, server)
    server.finished, server.written, server.in_flight = 7, 900, 3
    await share._renew(Report(True, 2))
    server.finished, server.written, server.in_flight = 9, 1000, 1
    script.error = StoreUnreachable("away")
    with pytest.raises(StoreUnreachable):
        await share._renew(Report(False, 0))
    script.error = None
    await share._renew(Report(True, 0, 40, {"why": "x"}, (0.02, None)))
    address, worker, lease_ms, *first = script.calls[0]
    assert (address, lease_ms, len(worker)) == ("host:8000", 5000, 32)
    assert first[:5] == [1, 3, 2, 7, 900]
    assert script.calls[1][3:8] == (0, 3, 0, 2, 100)  # the most in flight since the last report
    third = script.calls[2][3:]
    assert third[:5] == (1, 1, 0, 2, 100)
    assert (third[5], orjson.loads(third[6]), third[8]) == (40, {"why": "x"}, "0.020000 -")


async def test_answers_of_all_workers_are_counted_without_a_jump() -> None:
    script, server = Script(), upstream()
    share = share_of(script, server)
    server.finished = 5
    script.reply = {"finished": 1005}  # the others' count began before
    await share._renew(Report(True, 0))
    assert share.finished == 5
    server.finished = 6
    assert share.finished == 6
    script.reply = {"finished": 1026}
    await share._renew(Report(True, 0))
    assert share.finished == 26
    script.reply = {"finished": 0}  # the hash has expired
    await share._renew(Report(True, 0))
    assert share.finished == 26


async def test_a_lease_ends_and_its_values_are_read_with_care(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script()
    share = share_of(script)
    assert share.lease is None
    script.reply = {"shown": b'{"why": "x"}', "quiet": b"0.02 nan", "limit": 9, "today": 70}
    await share._renew(Report(True, 0))
    assert share.lease is not None
    assert (share.lease.shown, share.lease.quiet) == ({"why": "x"}, (0.02, None))
    assert (share.lease.limit, share.tokens_today) == (9, 70)
    script.reply = {"shown": b"[1", "quiet": b"\xff"}
    await share._renew(Report(True, 0))
    assert (share.lease.shown, share.lease.quiet, share.lease.limit) == ({}, (None, None), None)
    monkeypatch.setattr(server_share, "LEASE_S", 0.0)
    assert share.lease is None
    assert share.latest is not None


async def test_renewals_go_on_while_redis_is_away() -> None:
    script = Script()
    script.error = StoreUnreachable("away")
    share, ends = share_of(script), list[bool]()
    task = asyncio.create_task(
        share.run(lambda: Report(True, 0), lambda: ends.append(share.lease is not None))
    )
    await script.called.wait()
    script.called.clear()
    script.error = None
    share.renew_soon()
    async with asyncio.timeout(5):
        await script.called.wait()
    task.cancel()
    await asyncio.wait([task])
    assert ends[0] is False
    assert share.tried


async def test_nothing_is_sent_before_redis_was_asked_for_the_others() -> None:
    script = Script()
    sharing = sharing_of(script, ttft_s=1, itl_s=1)
    assert second(sharing) == 0
    await renew(sharing)
    assert sharing._upstream.limit == FIRST


async def test_without_redis_a_worker_measures_for_itself_as_one_that_is_alone() -> None:
    script = Script()
    script.error = StoreUnreachable("away")
    sharing = sharing_of(script, ttft_s=1, itl_s=1)
    await renew(sharing)
    assert second(sharing) == FIRST


async def test_a_worker_that_does_not_lead_has_its_share_and_shows_what_the_leader_measured() -> (
    None
):
    script = Script()
    shown = orjson.dumps({"why": "nobody is slower", "in_server": 30, "paused": False})
    script.reply = {"leads": 0, "limit": 24, "share": 12, "others": 1, "busy": 11, "today": 500,
                    "shown": shown}  # fmt: skip
    sharing = sharing_of(script, ttft_s=1, itl_s=1)
    await renew(sharing)
    assert sharing._upstream.limit == 12
    assert second(sharing, 12) == 12
    row = sharing.shown()
    assert row["why"] == "nobody is slower"
    assert (row["limit"], row["workers"], row["in_flight"], row["in_server"]) == (24, 2, 11, 30)
    assert row["tokens_today"] == 500
    assert script.calls[-1][8] == ""  # it publishes no limit


async def test_a_worker_without_redis_keeps_to_its_last_share_and_measures_for_itself() -> None:
    script = Script()
    script.reply = {"leads": 0, "limit": 24, "share": 12, "others": 1}
    sharing = sharing_of(script, ttft_s=1, itl_s=1)
    await renew(sharing)
    script.error = StoreUnreachable("away")
    await renew(sharing)
    limits = [second(sharing, 12) for _ in range(30)]
    assert 0 < max(limits) <= 12
    script.error, script.reply["share"] = None, 3
    await renew(sharing)
    assert sharing._upstream.limit == 3


async def test_a_leader_publishes_the_limit_and_keeps_to_its_own_share() -> None:
    script = Script()
    script.reply = {"share": 4, "others": 1, "quiet": b"0.02 0.006"}
    sharing = sharing_of(script)
    await renew(sharing)
    assert second(sharing) == min(FIRST, 4)
    await renew(sharing)
    address, _, _, can_lead, *_, limit, shown, model, quiet = script.calls[-1]
    assert (address, can_lead, limit, model) == ("host:8000", 1, sharing.guard.limit, "m")
    assert orjson.loads(shown)["ttft_ms_target"] == 60.0
    assert quiet == ""  # what Redis has is not new


async def test_a_new_leader_begins_with_the_limit_and_the_quiet_values_of_the_last_one() -> None:
    script = Script()
    script.reply = {"leads": 0, "limit": 80, "share": 40, "others": 1, "quiet": b"0.02 0.006"}
    sharing = sharing_of(script)
    await renew(sharing)
    script.reply |= {"leads": 1, "others": 0, "share": 80}
    await renew(sharing)
    assert second(sharing, 40) == 80
    assert not sharing.guard.learning


async def test_a_leader_that_has_lost_its_place_forgets_its_own_limit() -> None:
    script = Script()
    sharing = sharing_of(script, ttft_s=1, itl_s=1)
    sharing.guard.take_over(100)
    script.reply = {"leads": 0, "limit": 0, "share": 0, "others": 1, "shown": b'{"paused": true}'}
    await renew(sharing)
    script.reply |= {"leads": 1, "share": 0, "others": 0}
    await renew(sharing)
    assert second(sharing, 3) <= FIRST


async def test_a_rest_lowers_the_limit_of_all_workers_and_another_one_may_lead() -> None:
    script = Script()
    script.reply = {"limit": 80, "share": 40, "others": 1, "busy": 40}
    sharing = sharing_of(script, ttft_s=1, itl_s=1)
    sharing.guard.take_over(80)
    sharing._leads = True
    await renew(sharing)
    assert second(sharing, 40) == 40
    sharing._upstream.limit = 28  # 70 %
    await renew(sharing)
    assert sharing.guard.limit == 56
    sharing._upstream.up = False
    await renew(sharing)
    assert script.calls[-1][3] == 0


# -- running requests that are ended for people --------------------------------------------


async def run_until_returned(server: Upstream) -> bool:
    """Run a request that does not end by itself; return whether it was returned."""
    try:
        async with server.returnable():
            await asyncio.Event().wait()
    except RequestReturned:
        return True
    return False


@pytest.mark.parametrize("aborts", [False, True])
async def test_a_pause_returns_running_requests_only_with_people_abort(aborts: bool) -> None:
    script = Script()
    sharing = sharing_of(script, ttft_s=0.1, itl_s=1)
    sharing._aborts = aborts
    await renew(sharing)
    running = [asyncio.create_task(run_until_returned(sharing._upstream)) for _ in range(3)]
    await asyncio.sleep(0)
    sharing._leads, sharing._ttft_s = True, 5.0
    assert second(sharing, 3) == 0
    assert sharing.guard.paused
    done, _ = await asyncio.wait(running, timeout=0.1)
    assert len(done) == (3 if aborts else 0)
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_a_worker_that_does_not_lead_returns_its_requests_at_the_leaders_pause() -> None:
    script = Script()
    script.reply = {"leads": 0, "limit": 9, "share": 4, "others": 1, "shown": b'{"paused": false}'}
    sharing = sharing_of(script)
    sharing._aborts = True
    await renew(sharing)
    running = asyncio.create_task(run_until_returned(sharing._upstream))
    await asyncio.sleep(0)
    await renew(sharing)
    assert not running.done()
    script.reply |= {"limit": 0, "share": 0, "shown": b'{"paused": true}'}
    await renew(sharing)
    assert sharing._upstream.limit == 0
    async with asyncio.timeout(5):
        assert await running


async def test_a_cancelled_request_is_cancelled_and_not_returned() -> None:
    server = upstream()
    running = asyncio.create_task(run_until_returned(server))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not server._returnable
