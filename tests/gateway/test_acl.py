"""A gateway under its own user of Redis has the rights that it needs by docs/how-to/security.md."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest
from kit.commands.support import producer_command, producer_env
from kit.gateways.gateway_process import GatewayProcess
from kit.gateways.http_batches import ended, request, results, upload
from kit.servers.webhook_receiver import Receiver
from kit.stacks.celery_side import simulated

from demo.stack import ROOT, RedisServer, eventually

PASSWORD = "s3cr3t-of-this-test"
MODEL = "small"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis with the documented users, and the test's administrator."""
    text = (ROOT / "docs/how-to/security.md").read_text()
    with RedisServer(tmp_path / "redis", "--appendonly", "no") as found:
        for user, rules in re.findall(r"^user (\S+) (.*)$", text, re.MULTILINE):
            words = rules.replace("CHANGE-ME", PASSWORD).split()
            found.client().execute_command("ACL", "SETUSER", user, *words)
        yield found
        assert refused(found) == set()


def url_of(server: RedisServer, user: str) -> str:
    return f"redis://{user}:{PASSWORD}@127.0.0.1:{server.port}/0"


def refused(server: RedisServer) -> set[str]:
    """Return what Redis's own log says was refused, without CLIENT SETINFO."""
    told = {f"{e['username']}: {e['reason']} {e['object']}" for e in server.client().acl_log()}
    return {line for line in told if not line.endswith(("command client", "client|setinfo"))}


def run_producer(url: str, *words: str) -> str:
    done = subprocess.run(
        producer_command(*words), env=producer_env(url), capture_output=True, timeout=60, check=True
    )
    return done.stdout.decode()


@pytest.mark.timeout(150)
def test_everything_runs_under_the_documented_user(server: RedisServer, tmp_path: Path) -> None:
    url = url_of(server, "warmq-gateway")
    limits = ("--requests-per-minute", "600", "--tokens-per-minute", "90000", "--enqueued-tokens",
              "1000000", "--file-bytes", "1000000")  # fmt: skip
    key = run_producer(url, "keys", "create", "--tenant", "t", *limits).strip()
    run_producer(url, "keys", "list")
    worker = simulated(
        url_of(server, "warmq-worker"), tmp_path / "worker.log", served_model_name=MODEL
    )
    with (
        worker,
        Receiver() as receiver,
        GatewayProcess(url, tmp_path, gateway_private_webhooks=True) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client,
        anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0) as other,
    ):
        run_producer(url, "webhooks", "create", "--tenant", "t", "--url", receiver.url)
        run_producer(url, "webhooks", "list")
        eventually(lambda: client.models.list().data, 30, "a worker announces itself")
        online(client)
        responses(client)
        batches(client)
        message_batch(other)
        receiver.wait()
    (kept,) = orjson.loads(run_producer(url, "keys", "list", "--json"))
    run_producer(url, "keys", "revoke", kept["id"])


def online(client: openai.OpenAI) -> None:
    """Ask whole and streamed, and again under the same key."""
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"Idempotency-Key": "chat-1"}
    first = client.chat.completions.create(**asked, extra_headers=headers)
    again = client.chat.completions.create(**asked, extra_headers=headers)
    assert first.id == again.id
    assert list(client.chat.completions.create(**asked, stream=True))
    with client.chat.completions.create(**asked, user="simulate:sleep=9", stream=True) as stream:
        next(iter(stream))  # and then nobody reads it any more


def responses(client: openai.OpenAI) -> None:
    """Take background responses to their ends."""
    made = client.responses.create(model=MODEL, input="Hello", background=True)
    eventually(lambda: client.responses.retrieve(made.id).status == "completed", 20, "it ends")
    client.responses.input_items.list(made.id)
    client.responses.delete(made.id)
    slow = client.responses.create(
        model=MODEL, input="Hello", background=True, user="simulate:sleep=600"
    )
    eventually(lambda: client.responses.retrieve(slow.id).status == "in_progress", 20, "it runs")
    assert client.responses.cancel(slow.id).status == "cancelled"


def batches(client: openai.OpenAI) -> None:
    """Take files and uploads through batches, their lists and their ends."""
    source = upload(client, [request(f"r{n}", MODEL) for n in range(5)])
    asked: Any = {"endpoint": "/v1/chat/completions", "completion_window": "1h"}
    headers = {"Idempotency-Key": "batch-1"}
    batch = client.batches.create(input_file_id=source, **asked, extra_headers=headers)
    client.batches.retrieve(batch.id, extra_query={"partial": "true"})
    done = ended(client, batch.id)
    assert set(results(client, done)) == {f"r{n}" for n in range(5)}
    slow = upload(client, [request("slow", MODEL, user="simulate:sleep=600")])
    running = client.batches.create(input_file_id=slow, **asked)
    eventually(
        lambda: client.batches.retrieve(running.id).status == "in_progress", 20, "it is queued"
    )
    partial = client.batches.retrieve(running.id, extra_query={"partial": "true"}).output_file_id
    assert partial is not None
    client.files.content(partial)
    client.batches.cancel(running.id)
    assert ended(client, running.id).status == "cancelled"
    assert len(list(client.batches.list(limit=1))) == 2
    made = client.uploads.create(bytes=4, filename="a", mime_type="text/plain", purpose="user_data")
    part = client.uploads.parts.create(made.id, data=b"four")
    file = client.uploads.complete(made.id, part_ids=[part.id]).file
    assert file is not None
    client.uploads.cancel(
        client.uploads.create(bytes=4, filename="a", mime_type="a/b", purpose="user_data").id
    )
    for found in list(client.files.list(limit=2)):
        client.files.delete(found.id)


def message_batch(client: anthropic.Anthropic) -> None:
    """Take a message batch from its creation to its deletion."""
    params: Any = {
        "model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]
    }  # fmt: skip
    made = client.messages.batches.create(requests=[{"custom_id": "m1", "params": params}])
    eventually(
        lambda: client.messages.batches.retrieve(made.id).processing_status == "ended",
        30,
        "it ends",
    )
    assert len(list(client.messages.batches.results(made.id))) == 1
    client.messages.batches.delete(made.id)


def test_metrics_are_read_under_the_documented_user(server: RedisServer, tmp_path: Path) -> None:
    with GatewayProcess(url_of(server, "warmq-gateway"), tmp_path) as gateway:

        def page() -> str:
            return httpx.get(f"{gateway.url}/metrics", timeout=10).text

        eventually(lambda: "warmq_redis_up 1.0" in page(), 30, "Redis could be read", 0.2)
