"""What the command shows of servers that workers share with people."""

from __future__ import annotations

from kit.commands.doctor_findings import announce, doctor
from kit.commands.support import as_json, run_producer
from kit.protocol.lessee import submit_batch

from contract.redis.batches import BatchStore
from demo.stack import RedisServer

ROW = {
    "server": "host:8000", "in_flight": 12, "in_server": 30, "limit": 24, "workers": 2,
    "why": "nobody is slower", "paused": False, "ttft_ms": 30.1, "ttft_ms_target": 66.0,
    "itl_ms": 8.0, "itl_ms_target": 16.2, "tokens_today": 1203,
}  # fmt: skip


def test_status_top_and_doctor_show_each_shared_server_once(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store, shared=[ROW])
    announce(own_store, "celery@b.1.0", shared=[ROW])
    submit_batch(own_store, 3, batch_id="b1")
    (shown,) = as_json(run_producer("status", "b1", "--json", redis_url=own.url))["servers"]
    assert shown == ROW
    assert "host:8000: 12 of 30" in run_producer("status", "b1", redis_url=own.url).stdout
    assert doctor(own.url, 0)["shared_server"]["facts"]["why"] == "nobody is slower"
    top = run_producer("top", "--once", redis_url=own.url).stdout
    assert "host:8000" in top
    assert "1,203" in top


def test_without_a_shared_server_none_is_shown(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store)
    submit_batch(own_store, 3, batch_id="b1")
    assert as_json(run_producer("status", "b1", "--json", redis_url=own.url))["servers"] == []
    assert "shared_server" not in doctor(own.url, 0)
