"""`Idempotency-Key`: a retry gets the first try's answer, and nothing is done twice."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import orjson
import pytest
import redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from contract.redis.connect import connect
from demo.stack import RedisServer, eventually
from gateway.app import RequestContext
from gateway.http import idempotency as asked
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, json_error
from gateway.http.idempotency import LARGEST_ANSWER, Idempotency, replayed_response
from gateway.redis import idempotency as stored
from gateway.redis.idempotency import IdempotencyStore, Renewals

Handle = Callable[[Request], Awaitable[Response]]


class Gateway:
    """The middleware over one handler, which counts; two of them are two gateways."""

    def __init__(self, url: str) -> None:
        self.tries = IdempotencyStore.open(url, "test")
        self.seen: list[tuple[bytes, str]] = []
        self.handle: Handle = self.make
        self.caller = Caller(tenant="t", key_id="key_1")
        app = Starlette(
            routes=[Route("/{path:path}", self._run, methods=["POST", "GET"])],
            exception_handlers={ApiError: lambda _, error: json_error(error)},  # type: ignore[dict-item]
        )
        self.renewals = Renewals(connect(url, "test"))
        whole = RequestContext(self._as(Idempotency(app, self.tries, self.renewals)))
        transport = httpx.ASGITransport(whole, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://in")

    def _as(self, app: Any) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            scope["warmq.caller"] = self.caller
            await app(scope, receive, send)

        return call

    async def _run(self, request: Request) -> Response:
        return await self.handle(request)

    async def make(self, request: Request) -> Response:
        """Make an object; it is another one each time."""
        self.seen.append((await request.body(), request.scope["warmq.idempotency"]))
        return JSONResponse({"id": f"batch_{len(self.seen)}"}, headers={"x-other": "1"})

    async def post(
        self, key: str | None = "k1", body: bytes = b"{}", path: str = "/v1/batches", **more: Any
    ) -> httpx.Response:
        headers = {"idempotency-key": key} if key is not None else {}
        return await self.client.post(path, content=body, headers=headers, **more)

    async def close(self) -> None:
        await self.client.aclose()
        await self.tries.close()
        self.renewals.close()


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[Gateway]:
    made = Gateway(redis_url)
    yield made
    await made.close()


@pytest.fixture
async def other(redis_url: str) -> AsyncIterator[Gateway]:
    made = Gateway(redis_url)
    yield made
    await made.close()


async def test_a_retry_gets_the_first_answer_from_whichever_gateway(
    gateway: Gateway, other: Gateway, redis_client: redis.Redis
) -> None:
    first = await gateway.post(body=b'{"a": 1}')
    for each in (gateway, other):
        again = await each.post(body=b'{"a": 1}')
        assert again.content == first.content
        assert again.status_code == 200
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers["content-type"] == "application/json"
        assert again.headers["x-request-id"] != first.headers["x-request-id"]
        assert "x-other" not in again.headers
    assert "idempotent-replayed" not in first.headers
    assert len(gateway.seen) == 1
    assert gateway.seen[0][0] == b'{"a": 1}'
    assert not other.seen
    (key,) = redis_client.scan_iter("warmq:gateway:idempotent:*")
    assert redis_client.ttl(key) > 24 * 3600


async def test_the_text_for_ids_is_the_same_for_each_try_and_empty_without_a_key(
    gateway: Gateway, other: Gateway
) -> None:
    async def fail(request: Request) -> Response:
        gateway.seen.append((b"", request.scope["warmq.idempotency"]))
        return JSONResponse({}, 503)

    gateway.handle = other.handle = fail
    for key in ("k1", "k1", "k2", None, None):
        await gateway.post(key)
    await other.post("k1")
    names = [name for _, name in gateway.seen]
    assert names[0] == names[1] == names[5] != names[2]
    assert names[3] == names[4] == ""
    assert len(names[0]) == 64


async def test_without_a_key_each_post_is_its_own(gateway: Gateway) -> None:
    ids = {(await gateway.post(None)).content for _ in range(3)}
    assert len(ids) == 3


async def test_another_body_under_the_same_key_is_a_conflict_that_sdks_do_not_retry(
    gateway: Gateway,
) -> None:
    await gateway.post(body=b'{"a": 1}')
    told = await gateway.post(body=b'{"a": 2}')
    assert told.status_code == 409
    assert told.headers["x-should-retry"] == "false"
    assert told.json()["error"]["code"] == "idempotency_conflict"
    assert (await gateway.post(body=b'{"a": 1}', params={"x": "1"})).status_code == 409
    assert len(gateway.seen) == 1
    client = openai.AsyncOpenAI(base_url="http://in/v1", api_key="k", http_client=gateway.client)  # type: ignore[arg-type]
    with pytest.raises(openai.ConflictError):
        await client.batches.create(
            input_file_id="file-1", endpoint="/v1/embeddings", completion_window="24h",
            extra_headers={"Idempotency-Key": "k1"},
        )  # fmt: skip
    assert len(gateway.seen) == 1


async def test_a_key_is_its_callers_and_its_paths_own(gateway: Gateway) -> None:
    assert (await gateway.post()).json() == {"id": "batch_1"}
    assert (await gateway.post(path="/v1/uploads")).json() == {"id": "batch_2"}
    gateway.caller = Caller(tenant="t", key_id="key_2")
    assert (await gateway.post()).json() == {"id": "batch_3"}
    gateway.caller = Caller(tenant="t", key_id="key_1")
    assert (await gateway.post()).json() == {"id": "batch_1"}


async def test_a_get_is_not_looked_at(gateway: Gateway) -> None:
    for _ in range(2):
        await gateway.client.get("/v1/batches", headers={"idempotency-key": "k1"})
    assert [name for _, name in gateway.seen] == ["", ""]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_what_may_pass_is_not_kept(gateway: Gateway, status: int) -> None:
    async def fail(_: Request) -> Response:
        return JSONResponse({}, status)

    gateway.handle = fail
    assert (await gateway.post()).status_code == status
    gateway.handle = gateway.make
    assert (await gateway.post()).json() == {"id": "batch_1"}


async def test_a_mistake_of_the_caller_is_kept(gateway: Gateway) -> None:
    async def refuse(_: Request) -> Response:
        raise ApiError(400, "no", param="endpoint")

    gateway.handle = refuse
    first = await gateway.post()
    gateway.handle = gateway.make
    again = await gateway.post()
    assert (again.status_code, again.content) == (400, first.content)


async def test_a_fault_of_the_gateway_is_not_kept(gateway: Gateway) -> None:
    async def fail(_: Request) -> Response:
        raise RuntimeError("bug")

    gateway.handle = fail
    assert (await gateway.post()).status_code == 500
    gateway.handle = gateway.make
    assert (await gateway.post()).json() == {"id": "batch_1"}


async def running(gateway: Gateway, path: str = "/v1/batches") -> tuple[Any, asyncio.Event]:
    """Start a POST that ends when the event is set; return it once it runs."""
    began, end = asyncio.Event(), asyncio.Event()

    async def wait(request: Request) -> Response:
        began.set()
        await end.wait()
        return await gateway.make(request)

    gateway.handle = wait
    first = asyncio.create_task(gateway.post(path=path))
    await began.wait()
    return first, end


async def test_while_the_first_runs_a_retry_is_told_to_come_again(
    gateway: Gateway, other: Gateway
) -> None:
    first, end = await running(gateway)
    told = await other.post()
    assert told.status_code == 409
    assert told.headers["retry-after"] == "1"
    assert told.headers["x-should-retry"] == "true"
    assert (await other.post(body=b"other")).headers["x-should-retry"] == "false"
    end.set()
    answered = await first
    assert (await other.post()).content == answered.content
    assert not other.seen


async def test_an_online_retry_goes_through_while_the_first_runs(
    gateway: Gateway, other: Gateway
) -> None:
    first, end = await running(gateway, "/v1/chat/completions")
    attached = await other.post(path="/v1/chat/completions")
    assert attached.status_code == 200
    assert len(other.seen) == 1
    assert (await other.post(path="/v1/chat/completions", body=b"other")).status_code == 409
    end.set()
    await first
    assert other.seen[0][1] == gateway.seen[0][1]  # by this it knows the request
    # The first one's answer is the one that stays.
    assert (await other.post(path="/v1/chat/completions")).content == (await first).content


async def test_a_client_that_goes_leaves_the_key_to_its_retry(
    gateway: Gateway, other: Gateway
) -> None:
    first, _ = await running(gateway)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (await other.post()).json() == {"id": "batch_1"}


async def test_a_gateway_without_a_thread_for_the_lease_leaves_the_key_to_the_retry(
    gateway: Gateway, other: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        assert (await gateway.post()).status_code == 500
    assert (await other.post()).json() == {"id": "batch_1"}


async def test_a_gateway_that_died_is_followed_by_another_when_its_lease_ends(
    gateway: Gateway, other: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "LEASE_MS", 300)
    name = "n" * 64
    assert (await gateway.tries.begin(name, "f", "dead")).state == "new"
    begun = await other.tries.begin(name, "f", "alive")
    assert begun.state == "running"
    assert 0 < begun.wait_ms <= 300
    await asyncio.sleep(begun.wait_ms / 1000)  # the lease's end is what is waited for
    assert (await other.tries.begin(name, "f", "alive")).state == "new"
    assert gateway.renewals.renew([(name, "dead"), (name, "alive")]) == [False, True]
    await gateway.tries.finish(name, "dead", None)  # too late: it is another one's
    assert (await gateway.tries.begin(name, "f", "third")).state == "running"
    assert (await other.tries.begin(name, "g", "third")).state == "other"


async def test_the_key_of_a_post_that_lasts_is_held_for_longer(
    redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stored, asked):
        monkeypatch.setattr(module, "LEASE_MS", 400)
    gateway = Gateway(redis_url)
    first, end = await running(gateway)
    (key,) = redis_client.scan_iter("warmq:gateway:idempotent:*")
    until = int(redis_client.hget(key, "until"))

    def renewed() -> bool:
        return int(redis_client.hget(key, "until")) > until + 400

    await asyncio.to_thread(eventually, renewed, 10)
    end.set()
    assert (await first).status_code == 200
    await gateway.close()


async def test_one_of_many_at_once_is_the_first(gateway: Gateway, other: Gateway) -> None:
    async def slow(request: Request) -> Response:
        await asyncio.sleep(0.05)
        return await gateway.make(request)

    gateway.handle = other.handle = slow
    found = await asyncio.gather(*(each.post() for each in (gateway, other) for _ in range(20)))
    assert len(gateway.seen) == 1
    assert {reply.status_code for reply in found} <= {200, 409}


async def test_a_streamed_or_long_answer_is_not_kept_but_known(gateway: Gateway) -> None:
    async def stream(request: Request) -> Response:
        gateway.seen.append((await request.body(), request.scope["warmq.idempotency"]))
        return StreamingResponse(iter([b"data: x\n\n"]), media_type="text/event-stream")

    async def long(request: Request) -> Response:
        gateway.seen.append((await request.body(), request.scope["warmq.idempotency"]))
        return Response(b"x" * (LARGEST_ANSWER + 1))

    for handle, key in ((stream, "k1"), (long, "k2")):
        gateway.handle, gateway.seen = handle, []
        first, again = await gateway.post(key), await gateway.post(key)
        assert again.content == first.content
        assert "idempotent-replayed" not in again.headers
        assert len(gateway.seen) == 2
        assert len(set(gateway.seen)) == 1
        assert (await gateway.post(key, body=b"other")).status_code == 409


async def test_a_key_must_be_readable(gateway: Gateway) -> None:
    for key in ("k" * 256, "a\tb"):
        told = await gateway.post(key)
        assert told.status_code == 400
        assert told.json()["error"]["param"] == "Idempotency-Key"
    assert (await gateway.post("k" * 255)).status_code == 200


async def test_without_redis_nothing_is_done(redis_server: RedisServer) -> None:
    nowhere = Gateway("redis://127.0.0.1:1/0")
    assert (await nowhere.post()).status_code == 503
    assert (await nowhere.post(None)).status_code == 200
    assert len(nowhere.seen) == 1
    await nowhere.close()


# -- files: multipart, whose boundary differs at each try --------------------------------


async def upload(request: Request) -> Response:
    """Do as the handler of files does: read all, tell what it was, then make the object."""
    async with request.form() as form:
        content = await form["file"].read()  # type: ignore[union-attr]
    digest = hashlib.sha256(content + str(form["purpose"]).encode()).hexdigest()
    earlier = await replayed_response(request, digest)
    return earlier or JSONResponse({"id": f"file-{orjson.dumps(len(content)).decode()}"})


async def test_a_file_is_known_by_its_content(gateway: Gateway, other: Gateway) -> None:
    gateway.handle = other.handle = upload

    async def send(each: Gateway, content: bytes, key: str | None = "k1") -> httpx.Response:
        headers = {"idempotency-key": key} if key else {}
        return await each.client.post(
            "/v1/files", files={"file": content}, data={"purpose": "batch"}, headers=headers
        )

    first = await send(gateway, b"abc")
    again = await send(other, b"abc")
    assert first.content == again.content == b'{"id":"file-3"}'
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    told = await send(gateway, b"abd")
    assert told.status_code == 409
    assert told.headers["x-should-retry"] == "false"
    assert (await send(gateway, b"abc", None)).status_code == 200


async def test_a_file_that_is_still_coming_is_not_taken_twice(
    gateway: Gateway, other: Gateway
) -> None:
    first, end = await running(gateway, "/v1/files")
    other.handle = upload
    told = await other.client.post(
        "/v1/files", files={"file": b"a"}, data={"purpose": "batch"},
        headers={"idempotency-key": "k1"},
    )  # fmt: skip
    assert told.status_code == 409
    end.set()
    await first
