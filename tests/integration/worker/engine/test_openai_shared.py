"""The openai engine in front of a server that people use, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest
from kit.servers.stub_server import StubServer
from msgspec.structs import replace

from contract.openai.body import CHAT_URL
from worker.engine import Completion, EngineRequest, RequestReturned
from worker.engine.openai import OpenAISettings
from worker.engine.openai.engine import OpenAIEngine
from worker.engine.openai.shared import PRIORITY, PROBE_ID
from worker.engine.openai.upstream import Upstream

#: Targets that a stub meets unless a test makes it slow.
TARGETS = {"openai_ttft_ms": 200.0, "openai_itl_ms": 10_000.0}


@asynccontextmanager
async def engine(server: StubServer, **settings: Any) -> AsyncIterator[OpenAIEngine]:
    """Yield a started engine in front of this server, which people use."""
    made = OpenAIEngine(
        OpenAISettings(
            engine="openai",
            openai_base_urls=server.url,
            **{"model": None, "openai_shared_with": "people"} | TARGETS | settings,
        )
    )
    await made.start()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.shutdown)


def chat(text: str = "hello", **fields: Any) -> EngineRequest:
    return EngineRequest(CHAT_URL, {"messages": [{"role": "user", "content": text}], **fields})


def start(running: OpenAIEngine, requests: list[EngineRequest]) -> list[asyncio.Task[Completion]]:
    return [
        asyncio.create_task(running.generate(request, f"r{n}"))
        for n, request in enumerate(requests)
    ]


async def until(look: Callable[[], object], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not look():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.01)


def requests_of(ids: Collection[str]) -> set[str]:
    """Return the ids that are not the engine's own, for example a probe's."""
    return {rid for rid in ids if not rid.startswith("warmq-")}


def upstream(running: OpenAIEngine) -> Upstream:
    assert running._servers is not None
    return running._servers.servers[0]


async def test_each_request_goes_behind_peoples_and_a_later_place_of_its_own_stays() -> None:
    async with StubServer() as server, engine(server) as running:
        places = [None, -5, 3, 20]
        requests = [chat(**({} if place is None else {"priority": place})) for place in places]
        await asyncio.gather(*start(running, requests))
        ours = {f"r{n}": PRIORITY for n in range(3)} | {"r3": 20}
        assert server.priorities == ours  # probes have people's
        await until(lambda: PROBE_ID in server.came)
        assert PROBE_ID not in server.priorities


async def test_a_server_without_the_policy_is_asked_once_and_answers_everything() -> None:
    async with StubServer() as server, engine(server) as running:
        server.has_policy = False
        await running.generate(chat(), "first")
        assert server.came.count("first") == 2
        answers = await asyncio.gather(*start(running, [chat(str(n)) for n in range(20)]))
        assert all(answer.completion_tokens == 1 for answer in answers)
        assert [server.came.count(f"r{n}") for n in range(20)] == [1] * 20


async def test_only_what_somebody_reads_is_streamed_where_metrics_show_progress() -> None:
    async with StubServer() as server, engine(server) as running:
        await asyncio.gather(*start(running, [chat(str(n)) for n in range(20)]))
        assert not requests_of(server.streamed)
        await running.generate(replace(chat(), listened=True), "read")
        assert requests_of(server.streamed) == {"read"}


async def test_a_server_without_metrics_shows_progress_by_streams() -> None:
    async with StubServer() as server:
        server.has_metrics = False
        async with engine(server) as running:
            await asyncio.gather(*start(running, [chat(str(n)) for n in range(20)]))
            assert server.streamed >= {f"r{n}" for n in range(20)}


async def test_the_second_try_is_streamed() -> None:
    async with StubServer() as server, engine(server) as running:
        await running.generate(chat(user="stub:cut,times=1"), "tried")
        assert server.came.count("tried") == 2
        assert requests_of(server.streamed) == {"tried"}


async def test_shared_with_nobody_nothing_is_added_and_nobody_is_probed() -> None:
    async with StubServer() as server, engine(server, openai_shared_with="nobody") as running:
        await asyncio.gather(*start(running, [chat(str(n)) for n in range(20)]))
        assert (server.priorities, PROBE_ID in server.came) == ({}, False)
        assert upstream(running).limit >= 32


async def test_as_many_run_as_the_server_can_start_and_none_waits_there() -> None:
    async with (
        StubServer(slots=12, latency_s=0.3) as server,
        engine(server, openai_ttft_ms=5000) as running,
    ):
        tasks = start(running, [chat(str(n)) for n in range(3000)])
        at = upstream(running)
        await until(lambda: at.limit == 12 and server.running == 12)
        waited = []
        for _ in range(100):
            await asyncio.sleep(0.02)
            waited.append(server.waiting)
        # A probe, and one more than could be started; on a busy machine a few more now and then.
        assert sorted(waited)[50] <= 2
        assert at.limit <= 13
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_concurrency_is_the_most_beside_people() -> None:
    async with (
        StubServer(latency_s=0.2) as server,
        engine(server, openai_concurrency=3) as running,
    ):
        await asyncio.gather(*start(running, [chat(str(n)) for n in range(40)]))
        assert server.most <= 3 + 1  # a probe


async def test_everything_pauses_while_the_first_token_is_much_too_late_then_goes_on() -> None:
    async with (
        StubServer(latency_s=0.1) as server,
        engine(server) as running,
        aiohttp.ClientSession() as person,
    ):
        body = {"messages": [{"role": "user", "content": "x"}], "user": "stub:seconds=600"}
        reading = asyncio.create_task(
            person.post(f"{server.url}/chat/completions", data=orjson.dumps(body))
        )
        at = upstream(running)
        tasks = start(running, [chat(str(n)) for n in range(400)])
        await until(lambda: len(server.came) > 60)
        server.first_s = 0.9
        await until(lambda: at.limit == 0, 5)
        await until(lambda: at.in_flight == 0)
        came = len(set(server.came))
        await until(lambda: server.came.count(PROBE_ID) > 8)
        assert len(set(server.came)) == came
        assert at.shown["shared"]["why"].startswith("paused: first token")
        server.first_s = 0.0
        await asyncio.gather(*tasks)
        reading.cancel()


async def test_a_pause_ends_running_requests_only_if_people_abort_is_set() -> None:
    async with (
        StubServer() as server,
        engine(server, openai_shared_with="people-abort") as running,
        aiohttp.ClientSession() as person,
    ):
        body = {"messages": [{"role": "user", "content": "x"}], "user": "stub:seconds=600"}
        reading = asyncio.create_task(
            person.post(f"{server.url}/chat/completions", data=orjson.dumps(body))
        )
        tasks = start(running, [chat(str(n), user="stub:seconds=600") for n in range(5)])
        at = upstream(running)
        await until(lambda: at.in_flight == 5)
        server.first_s = 0.9
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [RequestReturned] * 5
        assert (at.in_flight, at.limit) == (0, 0)
        await until(lambda: sum(name != PROBE_ID for name in server.left) == 5)
        assert at.up
        reading.cancel()


@pytest.mark.parametrize(
    ("name", "value"),
    [("openai_shared_with", "alone"), ("openai_ttft_ms", 0), ("openai_itl_ms", "soon")],
)
def test_a_wrong_value_names_its_setting(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        OpenAISettings(engine="openai", openai_base_urls="http://a/v1", **{name: value})


@pytest.mark.parametrize("shared_with", ["nobody", "people"])
async def test_a_server_with_a_full_queue_is_waited_for_and_gets_as_much_as_it_takes(
    shared_with: str,
) -> None:
    async with StubServer(slots=4, latency_s=0.05) as server:
        server.max_queued = 4
        async with engine(server, openai_shared_with=shared_with) as running:
            answers = await asyncio.gather(*start(running, [chat(str(n)) for n in range(150)]))
            assert [answer.completion_tokens for answer in answers] == [1] * 150
            assert 0 < server.refused < 150
