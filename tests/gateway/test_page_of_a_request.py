"""The page of one request whose worker died, and of one that ran more than once."""

from __future__ import annotations

import httpx
import orjson
from kit.commands.doctor_findings import announce, up_for_long
from kit.commands.support import finish, run_producer
from kit.gateways.gateway_process import GatewayProcess
from kit.protocol.lessee import Lessee, submit_batch

from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer

WORKER = "celery@a.12.0a1b2c3d"


def test_it_names_the_dead_worker_and_what_the_request_waits_for(
    gateway: GatewayProcess, redis_server: RedisServer, store: BatchStore
) -> None:
    queue = submit_batch(store, 2).batch.fields["queue"]
    lessee = Lessee(redis_server.client(), WORKER, queue)
    leases = lessee.pop(1)
    up_for_long(store)
    url = f"{gateway.url}/ui/batches/b1/request?id=c1"
    for silent_s, name, stalled in ((0, "running", False), (20, "waiting", True)):
        announce(store, WORKER, queue=queue, silent_s=silent_s)
        page = httpx.get(url).text
        assert f'status-{name}"' in page
        assert 'data-stall="lease_held"' in page if stalled else "data-stall" not in page
        assert f"<dd>{WORKER}</dd>" in page
        assert "<dt>Attempts</dt><dd>1</dd>" in page
        assert "question 1" in page
        told = run_producer("status", "b1", "--request", "c1", redis_url=redis_server.url).stdout
        assert ("it waits" if stalled else "a worker runs it") in told
        assert f"worker      {WORKER}\n" in told
        assert "attempts    1\n" in told
        assert ("a worker has died" in told) == stalled
        shown = orjson.loads(
            run_producer(
                "status", "b1", "--request", "c1", "--json", redis_url=redis_server.url
            ).stdout
        )
        assert (shown["running"], shown["worker"], shown["attempts"]) == (not stalled, WORKER, 1)
        assert ("lease_held" in {one["code"] for one in shown["stalls"]}) == stalled
    assert "Times handed back" in page
    # A living worker removes a dead one's announcement
    store._client.hdel(keys.WORKERS, WORKER)
    announce(store, "celery@b.12.0a1b2c3d", queue=queue)
    assert httpx.get(url).text.count('data-stall="lease_held"') == 1
    assert f"<dd>{WORKER}</dd>" in httpx.get(url).text
    assert "<dt>Attempts</dt><dd>1</dd>" in httpx.get(url).text
    finish(lessee, leases)
    ended = httpx.get(url).text
    assert 'status-completed"' in ended
    assert "data-stall" not in ended
    # Redis forgets these counts with the end
    assert "Times handed back" not in ended
    assert "Engine deaths" not in ended


def test_a_request_that_is_queued_again_says_where_its_prompt_is(
    gateway: GatewayProcess, redis_server: RedisServer, store: BatchStore
) -> None:
    queue = submit_batch(store, 2).batch.fields["queue"]
    lessee = Lessee(redis_server.client(), WORKER, queue)
    announce(store, WORKER, queue=queue)
    lessee.release(*lessee.pop(1))
    page = httpx.get(f"{gateway.url}/ui/batches/b1/request?id=c1").text
    assert 'status-waiting"' in page
    assert "Its prompt is shown here once a worker has the request." in page
