"""A `producer run` in the API and on the page: one batch, which can be cancelled there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from kit.commands.runs import running
from kit.commands.support import batch_file
from kit.gateways.gateway_process import GatewayProcess

from demo.stack import RedisServer, eventually


def test_a_run_is_one_batch_and_ends_when_it_is_cancelled_over_http(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1700), tmp_path / "out.jsonl"

    def listed() -> dict[str, Any]:
        found = httpx.get(f"{gateway.url}/v1/batches").json()["data"]
        assert len(found) <= 1
        return found[0] if found else {"request_counts": {"total": 0}}

    def page(path: str) -> str:
        answer = httpx.get(f"{gateway.url}/ui/batches{path}", follow_redirects=True)
        assert answer.status_code == 200, answer.text
        return answer.text

    with running(redis_server.url, source, out, "--window", "500") as process:
        eventually(lambda: listed()["request_counts"]["total"] == 1000, 30)
        batch = listed()
        assert batch["id"].startswith("run_")
        assert (batch["status"], batch["metadata"]["submitted_by"]) == (
            "in_progress", "producer run"
        )  # fmt: skip
        assert batch["id"] in page("")
        shown = page(f"/{batch['id']}")
        assert "producer run" in shown
        assert "/download/" not in shown
        cancelled = httpx.post(f"{gateway.url}/v1/batches/{batch['id']}/cancel")
        assert cancelled.status_code == 200, cancelled.text
        assert process.wait(30) == 1
    ended = listed()
    assert (ended["id"], ended["status"]) == (batch["id"], "cancelled")
    assert ended["request_counts"] == {"total": 1700, "completed": 0, "failed": 1700}
    assert (ended["output_file_id"], ended["error_file_id"]) == (None, None)
    shown = page(f"/{batch['id']}")
    assert "/retry" not in shown and "/download/" not in shown
