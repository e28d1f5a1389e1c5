"""A batch over HTTP while no worker runs: the page and the command name the reason."""

from __future__ import annotations

import httpx
import openai
from kit.commands.support import run_producer
from kit.gateways.gateway_process import GatewayProcess
from kit.gateways.http_batches import request, upload

from demo.stack import RedisServer, eventually


def test_a_batch_over_http_without_a_worker_is_a_stall(
    gateway: GatewayProcess, client: openai.OpenAI, redis_server: RedisServer
) -> None:
    batch = client.batches.create(
        input_file_id=upload(client, [request("r0")]), endpoint="/v1/chat/completions",
        completion_window="24h",
    )  # fmt: skip
    for path in (f"/ui/batches/{batch.id}", "/ui"):
        page = httpx.get(f"{gateway.url}{path}").text
        assert 'data-stall="no_worker"' in page
    assert "1 batch waits for a worker." in page
    done = run_producer("status", batch.id, redis_url=redis_server.url)
    assert done.returncode == 2
    assert "/v1/batches/" in done.stderr
    client.batches.cancel(batch.id)
    eventually(lambda: client.batches.retrieve(batch.id).status == "cancelled", 30)
    assert "no_worker" not in httpx.get(f"{gateway.url}/ui").text
