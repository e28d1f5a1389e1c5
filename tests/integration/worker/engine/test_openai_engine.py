"""The openai engine against a stub server, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from kit.servers.stub_server import OTHER_ANSWERS, StubServer

from contract.errors import EngineDead, RequestFailed, RequestRejected
from contract.openai.body import CHAT_URL, COMPLETION_URL, COUNTING, RESPONSES_URL, min_body
from contract.settings import SettingsError
from worker.engine import Completion, EngineRequest
from worker.engine.openai import OpenAISettings
from worker.engine.openai.blame import CONTROL_ID
from worker.engine.openai.engine import OpenAIEngine, dry_run
from worker.engine.simulated.engine import digest
from worker.engine.spec import Preflight

REFUSED = "connection refused"


@asynccontextmanager
async def engine(*servers: StubServer, **settings: Any) -> AsyncIterator[OpenAIEngine]:
    """Yield a started engine in front of these servers."""
    made = make(*servers, **settings)
    await made.start()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.shutdown)


def make(*servers: StubServer, **settings: Any) -> OpenAIEngine:
    urls = ",".join(server.url for server in servers)
    return OpenAIEngine(
        OpenAISettings(engine="openai", openai_base_urls=urls, **{"model": None} | settings)
    )


def chat(text: str = "hello", **fields: Any) -> EngineRequest:
    return EngineRequest(CHAT_URL, {"messages": [{"role": "user", "content": text}], **fields})


async def until(look: Callable[[], object], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not look():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.01)


def start(running: OpenAIEngine, requests: list[EngineRequest]) -> list[asyncio.Task[Completion]]:
    return [
        asyncio.create_task(running.generate(request, f"r{n}"))
        for n, request in enumerate(requests)
    ]


@pytest.mark.parametrize("vllm", [True, False])
async def test_a_streamed_answer_is_what_the_server_gives_at_once(vllm: bool) -> None:
    async with StubServer(vllm=vllm) as server, engine(server) as running:
        for request in (chat(), EngineRequest(COMPLETION_URL, {"prompt": "hello"})):
            streamed = await running.generate(request, "r1")
            at_once = await running.generate(
                EngineRequest(request.url, {**request.body, "echo": True}), "r1"
            )
            body, whole = orjson.loads(streamed.body), orjson.loads(at_once.body)
            if vllm:  # whose nulls a stub has not
                body = without_nulls(body)
                whole = without_nulls(whole)
            assert body == whole
            assert (streamed.prompt_tokens, streamed.completion_tokens) == (1, 1)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


async def test_the_model_of_the_line_is_in_the_answer_and_the_servers_own_is_asked() -> None:
    async with StubServer(model="served") as server, engine(server) as running:
        answer = orjson.loads((await running.generate(chat(model="mine"), "r1")).body)
        assert answer["model"] == "mine"
        assert orjson.loads((await running.generate(chat(), "r2")).body)["model"] == "served"


@pytest.mark.parametrize("url", OTHER_ANSWERS)
async def test_messages_responses_and_counts_are_the_servers(url: str) -> None:
    async with StubServer(model="served") as server, engine(server) as running:
        request = EngineRequest(url, min_body(url) | {"model": "mine"})
        answer = await running.generate(request, "r1")
    body = orjson.loads(answer.body)
    limit = {"max_output_tokens": running._settings.default_max_tokens}
    expected = request.body | {"model": "served"} | (limit if url == RESPONSES_URL else {})
    assert body.pop("asked") == expected
    counted = url in COUNTING
    assert body == {"id": "r1"} | OTHER_ANSWERS[url] | ({} if counted else {"model": "mine"})
    used = (answer.prompt_tokens, answer.completion_tokens)
    assert used == ((0, 0) if counted else (5, 4))


async def test_a_refused_key_ends_the_start_and_is_not_quoted() -> None:
    async with StubServer(key="right") as server:
        wrong = make(server, openai_api_key="s3cret")
        with pytest.raises(SettingsError, match="WARMQ_OPENAI_API_KEY") as caught:
            await wrong.start()
        await asyncio.to_thread(wrong.shutdown)
        assert "s3cret" not in str(caught.value)
        async with engine(server, openai_api_key="right") as running:
            await running.generate(chat(), "r1")


async def test_a_model_that_no_server_has_ends_the_start_naming_those_there_are() -> None:
    async with StubServer(model="served") as server:
        wrong = make(server, model="other")
        with pytest.raises(SettingsError, match="serves served; WARMQ_MODEL is other"):
            await wrong.start()
        await asyncio.to_thread(wrong.shutdown)


async def test_requests_go_where_the_fewest_are_in_flight() -> None:
    async with StubServer() as one, StubServer() as other:
        one.held.clear()
        other.held.clear()
        async with engine(one, other, openai_concurrency=8) as running:
            tasks = start(running, [chat(str(n)) for n in range(20)])
            await until(lambda: len(one.came) + len(other.came) == 16)
            assert (len(one.came), len(other.came)) == (8, 8)
            other.held.set()  # only this one goes on, so it gets what is left
            await until(lambda: len(other.came) == 12)
            assert len(one.came) == 8
            one.held.set()
            await asyncio.gather(*tasks)


async def test_a_server_that_is_away_gets_nothing_until_it_is_back() -> None:
    async with StubServer() as one, StubServer() as other, engine(one, other) as running:
        await one.stop()
        await asyncio.gather(*start(running, [chat(str(n)) for n in range(20)]))
        assert one.came == []
        assert running._servers is not None
        shown = running._servers.shown
        assert "onnect" in shown[one.url[7:-3]]
        assert shown[other.url[7:-3]]["limit"] >= 32
        assert len(set(other.came)) == 20
        await one.start()
        fleet = running._servers
        assert fleet is not None
        await until(lambda: all(u.up for u in fleet.servers))
        await asyncio.gather(*start(running, [chat(str(n)) for n in range(20)]))
        assert one.came


async def test_with_no_server_left_requests_go_back_unblamed_and_the_next_start_waits() -> None:
    async with StubServer() as server:
        server.held.clear()
        async with engine(server, openai_concurrency=4) as running:
            tasks = start(running, [chat(str(n)) for n in range(6)])
            await until(lambda: len(server.came) == 4)
            await server.stop()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(end) for end in ends] == [EngineDead] * 6
            assert not any(end.inside for end in ends if isinstance(end, EngineDead))
            assert running.dead()
        following = make(server)
        starting = asyncio.create_task(following.start())
        await asyncio.sleep(0)
        assert not starting.done()
        await server.start()
        await starting
        assert not following.dead()
        await asyncio.to_thread(following.shutdown)


async def test_a_server_that_says_when_is_left_alone_meanwhile_and_the_request_not_counted() -> (
    None
):
    async with StubServer() as one, StubServer() as other:
        other.times = one.times
        async with engine(one, other, openai_concurrency=8) as running:
            told = await running.generate(chat(user="stub:status=429,retry_after=600,times=1"), "a")
            assert told.completion_tokens == 1
            first = one if one.came else other
            assert (one.came + other.came).count("a") == 2
            seen = len(first.came)
            await asyncio.gather(*start(running, [chat(str(n)) for n in range(8)]))
            assert len(first.came) == seen
        async with engine(one) as running:  # more often than faults may be
            await running.generate(chat(user="stub:status=503,retry_after=0,times=4"), "b")
            assert one.came.count("b") == 5
            await running.generate(chat(user="stub:status=503,times=1"), "c")  # well, but busy
            assert one.came.count("c") == 2


@pytest.mark.parametrize("fate", ["status=500", "status=507", "cut", "error=500"])
async def test_a_fault_is_tried_again_and_ends_the_request_the_third_time(fate: str) -> None:
    async with StubServer() as server, engine(server) as running:
        others = start(running, [chat(user="stub:seconds=0.2") for _ in range(8)] * 20)
        with pytest.raises(RequestFailed, match="3 times, while other requests were answered"):
            await running.generate(chat(user=f"stub:{fate}"), "bad")
        assert server.came.count("bad") == 3
        await asyncio.gather(*others)
        await running.generate(chat(user=f"stub:{fate},times=2"), "again")
        assert server.came.count("again") == 3


async def test_a_request_that_is_alone_and_always_fails_ends_by_controls() -> None:
    async with StubServer() as server, engine(server) as running:
        with pytest.raises(RequestFailed, match="scripted 500"):
            await running.generate(chat(user="stub:status=500"), "r1")
        assert (server.came.count("r1"), server.came.count(CONTROL_ID)) == (3, 3)


async def test_a_refusal_is_the_requests_own_error_in_the_servers_words() -> None:
    async with StubServer() as server, engine(server) as running:
        with pytest.raises(RequestRejected, match="scripted 400") as caught:
            await running.generate(chat(user="stub:status=400"), "r1")
        assert (caught.value.code, caught.value.field) == ("invalid_request", "user")
        assert server.came == ["r1"]


async def test_a_request_that_stalls_at_a_server_that_is_well_fails_and_no_death_is_counted() -> (
    None
):
    async with StubServer() as server, engine(server, stall_timeout_s=0.5) as running:
        with pytest.raises(RequestFailed, match=r"no step for 0\.5 s"):
            await running.generate(chat(user="stub:hang"), "r1")
        await until(lambda: server.left == ["r1"] * 3)


async def test_a_stalled_request_goes_elsewhere() -> None:
    async with (
        StubServer() as one,
        StubServer() as other,
        engine(one, other, stall_timeout_s=0.5) as running,
    ):
        other.times = one.times
        await running.generate(chat(user="stub:hang,times=1"), "r1")
        assert (one.came, other.came) == (["r1"], ["r1"])


async def test_the_text_so_far_is_what_came_of_the_stream() -> None:
    async with StubServer() as server, engine(server) as running:
        requests = [chat(user="stub:hang"), chat(user="stub:hang", n=2)]
        requests.append(EngineRequest(COMPLETION_URL, {"prompt": "hello", "user": "stub:hang"}))
        tasks = start(running, requests)
        await until(lambda: all(running.text_so_far(f"r{n}") for n in range(3)))
        whole = f"simulated {digest(requests[0].body)}"
        for n in range(2):
            (text,) = running.text_so_far(f"r{n}")
            assert text
            assert whole.startswith(text)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert [*running.text_so_far("r0"), *running.text_so_far("never sent")] == []


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/score", "/rerank"])
async def test_what_pooling_models_are_asked_passes_as_it_is(url: str) -> None:
    async with StubServer() as server, engine(server) as running:
        request = EngineRequest(url, {"input": "hello", "model": "mine"})
        answer = await running.generate(request, "r1")
        (found,) = orjson.loads(answer.body)["data"]
        assert found == {"path": url, "asked": {"input": "hello", "model": "stub"}}
        assert orjson.loads(answer.body)["model"] == "mine"
        assert answer.prompt_tokens == 1


async def test_an_endpoint_that_the_server_does_not_have_is_told_as_such() -> None:
    async with StubServer() as server, engine(server) as running:
        with pytest.raises(RequestRejected, match="field url: the server's model") as caught:
            await running.generate(EngineRequest("/v1/rerank", {"query": "x"}), "r1")
        assert (caught.value.code, caught.value.field) == ("unknown_url", "url")


async def test_what_waits_behind_others_in_the_server_has_not_stalled() -> None:
    async with (
        StubServer(slots=1, latency_s=0.8) as server,
        engine(server, stall_timeout_s=2, openai_concurrency=6) as running,
    ):
        await asyncio.gather(*start(running, [chat(str(n)) for n in range(6)]))
        assert len(server.came) == 6


async def test_cancelling_a_request_closes_it_upstream() -> None:
    async with StubServer() as server, engine(server) as running:
        streamed, whole = start(
            running, [chat(user="stub:hang"), chat(user="stub:seconds=600", echo=True)]
        )
        await until(lambda: server.running == 2)
        streamed.cancel()
        whole.cancel()
        await until(lambda: sorted(server.left) == ["r0", "r1"])
        assert server.running == 0
        await running.generate(chat(), "r3")


async def test_256_at_once_share_one_pool_and_no_place_is_lost() -> None:
    async with StubServer(slots=256) as server:
        server.held.clear()
        async with engine(server, openai_concurrency=256) as running:
            tasks = start(running, [chat(str(n)) for n in range(600)])
            await until(lambda: len(server.came) == 256)
            for task in tasks[:100]:  # some inside, whose places are to be had again
                task.cancel()
            await until(lambda: len(server.left) == 100)
            server.held.set()
            answers = await asyncio.gather(*tasks[100:])
            assert server.most <= 256
            for n, answer in enumerate(answers, 100):
                said = orjson.loads(answer.body)["choices"][0]["message"]["content"]
                assert said == f"simulated {digest(chat(str(n)).body)}"


async def test_the_limit_settles_where_few_requests_wait() -> None:
    async with StubServer(slots=48, latency_s=0.3) as server, engine(server) as running:
        fleet = running._servers
        assert fleet is not None
        upstream = fleet.servers[0]
        tasks = start(running, [chat(str(n)) for n in range(3000)])
        await until(lambda: upstream.limit > 48)  # the slots, which nobody told it
        upstream.limit = 200
        await until(lambda: server.waiting > 100)
        await until(lambda: 48 < upstream.limit <= 48 + 24)
        assert server.most == 48
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_killed_engine_ends_everything_in_it() -> None:
    async with StubServer() as server, engine(server) as running:
        tasks = start(running, [chat(user="stub:hang") for _ in range(4)])
        await until(lambda: server.running == 4)
        running.kill()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDead] * 4


async def test_a_server_that_is_ill_with_requests_in_it_has_died_of_one_of_them() -> None:
    async with StubServer() as server, engine(server) as running:
        task = asyncio.create_task(running.generate(chat(user="stub:seconds=600"), "r1"))
        await until(lambda: server.running == 1)
        await server.stop()
        with pytest.raises(EngineDead) as caught:
            await task
        assert caught.value.inside


async def test_the_rehearsal_asks_each_server_once_and_leaves_no_connection() -> None:
    async with StubServer(model="served") as server:
        urls = f"{server.url},http://127.0.0.1:9/v1"
        settings = OpenAISettings(engine="openai", model=None, openai_base_urls=urls)
        seen = Preflight()
        await asyncio.to_thread(dry_run, settings, seen)
        assert seen.rows["model"] == "served"
        (away,) = seen.findings
        assert away.problem == "a server is not ready: 127.0.0.1:9: cannot be reached: " + REFUSED
        assert not away.fatal
        with pytest.raises(SettingsError, match=r"no server can be used: .*WARMQ_MODEL is other"):
            unusable = settings.model_copy(
                update={"model": "other", "openai_base_urls": server.url}
            )
            await asyncio.to_thread(dry_run, unusable, seen)


async def test_the_rehearsal_does_not_wait_for_a_server() -> None:
    urls = "http://127.0.0.1:9/v1"
    settings = OpenAISettings(engine="openai", model=None, openai_base_urls=urls)
    seen = Preflight()
    await asyncio.to_thread(dry_run, settings, seen)
    (found,) = seen.findings
    assert found.problem == "no server is ready: 127.0.0.1:9: cannot be reached: " + REFUSED
    assert found.fatal and "a worker that starts now waits for it" in found.remedy


@pytest.mark.parametrize(
    ("told", "length"),
    [("8k", 0), ("8192", 8192), (8192.0, 0), ([], 0), ({"tokens": 8}, 0), (-1, 0), (None, 0)],
)
async def test_a_length_that_is_no_number_is_ignored_in_words(
    told: Any, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with StubServer() as server:
        server.length = told
        running = make(server)
        assert (await running.start()).max_model_len == length
        assert (await running.generate(chat(), "r1")).completion_tokens == 1
        await asyncio.to_thread(running.shutdown)
    assert ("max_model_len" in caplog.text) == (length == 0 and told not in (None, [], -1))
