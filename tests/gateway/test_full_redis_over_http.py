"""A full Redis from outside: all is read, ended and deleted by HTTP, at the page, by commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import orjson
import pytest
from kit.commands.support import chat_line, run_producer
from kit.gateways.gateway_process import GatewayProcess

from contract.redis.batches import BatchStore
from contract.redis.tenants import Tenants
from demo.stack import RedisServer, eventually
from gateway.redis.api_keys import ApiKeys
from gateway.redis.webhooks import Webhooks

READS = ("/models", "/files", "/batches")
PAGES = ("/ui", "/ui/workers", "/ui/batches", "/ui/tenants", "/ui/dead", "/ui/batches/{batch}")
CHAT = "/v1/chat/completions"


class Filled:
    """A gateway whose Redis took no more after it had a batch in the queue, a file, an upload and
    a webhook of tenant t."""

    def __init__(self, redis: RedisServer, gateway: GatewayProcess) -> None:
        self.redis, self.gateway = redis, gateway
        self.store = BatchStore(redis.client(), ttl_ms=60_000)
        self.secret, self.key = ApiKeys.using(self.store).create("t")
        self.other = ApiKeys.using(self.store).create("t")[1]
        self.client = openai.OpenAI(
            base_url=f"{gateway.url}/v1", api_key=self.secret, max_retries=0, timeout=30
        )
        line = orjson.dumps(chat_line("r0", model="m"))
        files = [
            self.client.files.create(file=("in.jsonl", line), purpose="batch") for _ in range(2)
        ]
        self.input, self.spare = files
        self.upload = self.client.uploads.create(
            bytes=9, filename="x", mime_type="text/plain", purpose="batch"
        )
        self.batch = self.client.batches.create(
            input_file_id=self.input.id, endpoint=CHAT, completion_window="24h"
        )
        eventually(lambda: self.store.batch(self.batch.id), 20, "its part is queued")
        found = Webhooks.using(self.store).create("t", "https://a.example", ("batch.completed",))
        self.webhook = found.id
        client = redis.client()
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        with pytest.raises(Exception, match="maxmemory"):
            client.set("x", "y")

    def producer(self, *args: str) -> str:
        done = run_producer(*args, redis_url=self.redis.url)
        assert done.returncode == 0, (args, done.stderr)
        return done.stdout


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    with (
        RedisServer(tmp_path / "redis") as redis,
        GatewayProcess(redis.url, tmp_path, gateway_models="m") as gateway,
    ):
        found = Filled(redis, gateway)
        yield found
        found.client.close()


def test_what_is_there_is_read_and_ended_over_http(filled: Filled) -> None:
    with httpx.Client(headers={"authorization": f"Bearer {filled.secret}"}, timeout=30) as client:
        for path in (*READS, f"/files/{filled.input.id}", f"/files/{filled.input.id}/content"):
            answer = client.get(f"{filled.gateway.url}/v1{path}")
            assert answer.status_code == 200, (path, answer.text)
    assert filled.client.batches.retrieve(filled.batch.id).status == "in_progress"
    assert filled.client.files.delete(filled.spare.id).deleted
    assert filled.client.uploads.cancel(filled.upload.id).status == "cancelled"
    filled.client.batches.cancel(filled.batch.id)
    eventually(
        lambda: filled.client.batches.retrieve(filled.batch.id).status == "cancelled", 20, "it ends"
    )
    with pytest.raises(openai.InternalServerError, match="full") as refused:
        filled.client.batches.create(
            input_file_id=filled.input.id, endpoint=CHAT, completion_window="24h"
        )
    assert refused.value.status_code == 503


def test_an_operator_logs_in_and_cancels_at_the_page(filled: Filled) -> None:
    with httpx.Client(base_url=filled.gateway.url, timeout=30) as browser:
        token = _csrf(browser.get("/ui/login").text)
        done = browser.post("/ui/login", data={"key": filled.secret, "csrf": token, "next": "/ui"})
        assert done.status_code == 303, done.text
        for path in PAGES:
            page = browser.get(path.format(batch=filled.batch.id))
            assert page.status_code == 200, (path, page.text[:500])
        token = _csrf(page.text)
        done = browser.post(f"/ui/batches/{filled.batch.id}/cancel", data={"csrf": token})
        assert done.status_code == 303, done.text
        eventually(
            lambda: filled.client.batches.retrieve(filled.batch.id).status == "cancelled", 20
        )
        done = browser.post("/ui/logout", data={"csrf": token})
        assert done.status_code == 303


def _csrf(text: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', text)
    assert found, text[:500]
    return found[1]


def test_an_operator_ends_and_deletes_by_commands(filled: Filled) -> None:
    for read in (("list",), ("status", filled.batch.id), ("tenant", "list"), ("keys", "list"),
                 ("webhooks", "list"), ("records",)):  # fmt: skip
        filled.producer(*read)
    filled.producer("tenant", "set", "t", "--max-in-flight", "1")
    assert Tenants.using(filled.store).tenant("t").max_in_flight == 1
    filled.producer("keys", "revoke", filled.other.id)
    filled.producer("webhooks", "delete", filled.webhook)
    assert Webhooks.using(filled.store).all() == []
    filled.producer("cancel", filled.batch.id)
    eventually(
        lambda: filled.client.batches.retrieve(filled.batch.id).status == "cancelled", 20, "it ends"
    )
    filled.producer("delete", filled.batch.id)  # with what its part holds: that fills Redis
    filled.producer("delete", filled.spare.id)
    assert filled.store.batch(filled.batch.id) is None
