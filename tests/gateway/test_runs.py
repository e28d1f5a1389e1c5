"""A `producer run` in the API and on the page: one batch, which can be cancelled there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from kit.commands.runs import running
from kit.commands.support import batch_file, chat_line, finish, write_lines
from kit.gateways.gateway_process import GatewayProcess
from kit.protocol.lessee import Lessee, client_of

from contract.errors import RequestFailed
from contract.redis.batches import BatchStore
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
        # More lines follow
        for path in ("", f"/{batch['id']}"):
            assert 'data-b="total">1,000+<' in page(path)
            assert "+: the run may read more lines" in page(path)
        assert 'class="notice"' in page(f"/{batch['id']}?notice=started")
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
    # The run is complete: only --retry runs the cancelled lines
    assert "The same <code>producer run</code> with --retry cancelled runs them." in shown
    assert "was interrupted" not in shown
    # A batch that has ended has started long ago
    assert 'class="notice"' not in page(f"/{batch['id']}?notice=started")
    assert 'class="notice"' in page(f"/{batch['id']}?notice=cancelled")


def test_a_stopped_run_shows_everywhere_that_it_was_stopped_and_why(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 700), tmp_path / "out.jsonl"
    store = BatchStore(redis_server.client(), ttl_ms=60_000)
    lessee = Lessee(client_of(store))
    command = (source, out, "--window", "500", "--stop-after-failures", "20")
    with running(redis_server.url, *command) as process:
        leases = eventually(lambda: lessee.pop(100), 30)
        finish(lessee, leases[:20], RequestFailed("it broke", code="broken"))
        finish(lessee, leases[20:])
        assert process.wait(30) == 1
    # Batches of one second have no order.
    listed = httpx.get(f"{gateway.url}/v1/batches").json()["data"]
    (batch,) = [one for one in listed if one["metadata"]["input"] == str(source)]
    (error,) = batch["errors"]["data"]
    assert (batch["status"], error["code"]) == ("cancelled", "too_many_failures")
    assert error["message"].startswith("stopped: 20 of ")
    shown = httpx.get(f"{gateway.url}/ui/batches/{batch['id']}").text
    assert error["message"] in shown
    assert "status-in_progress" not in shown and "/cancel" not in shown
    # The same command goes on with what was cancelled; it was never queued to its end
    assert "The same <code>producer run</code> runs them when it goes on." in shown
    assert "validated" not in shown
    assert "No batch runs." in httpx.get(f"{gateway.url}/ui").text


def test_a_complete_run_with_only_wrong_lines_offers_no_retry(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    wrong = chat_line("wrong", colour=1)
    source = write_lines(tmp_path / "in.jsonl", [chat_line("a"), chat_line("b"), wrong])
    store = BatchStore(redis_server.client(), ttl_ms=60_000)

    def shown(code: str, retry: str, name: str) -> str:
        """Answer the command; return the page of its run."""
        broken = [RequestFailed("it broke", code=code)] if code else []
        lessee = Lessee(client_of(store))
        with running(redis_server.url, source, tmp_path / name, *retry.split()) as process:

            def over() -> bool:
                finish(lessee, lessee.pop(1), *broken)
                finish(lessee, lessee.pop(9))
                return process.poll() is not None

            eventually(over, 30)
        (run,) = [one.id for one in store.batches() if one.fields["input"] == str(source)]
        return httpx.get(f"{gateway.url}/ui/batches/{run}", follow_redirects=True).text

    page = shown("request_failed", "", "out.jsonl")
    assert "--retry failed" in page
    assert "interrupted" not in page
    # It names the failed lines, whose requests are deleted, and where the others are
    assert "it broke" in page and "colour" in page
    assert "error_message" in page
    assert "/request" not in page
    page = shown("", "--retry failed", "out.jsonl")
    assert "a retry does not change: 1" in page
    assert "--retry" not in page


def test_a_run_that_has_only_wrong_lines_so_far_advises_no_retry(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    wrong = chat_line("wrong", colour=1)
    source = write_lines(tmp_path / "in.jsonl", [chat_line("a"), chat_line("b"), wrong])
    store = BatchStore(redis_server.client(), ttl_ms=60_000)
    lessee = Lessee(client_of(store))
    with running(redis_server.url, source, tmp_path / "out.jsonl") as process:
        leases = eventually(lambda: lessee.pop(9), 30)
        (run,) = [one.id for one in store.batches() if one.fields["input"] == str(source)]
        page = httpx.get(f"{gateway.url}/ui/batches/{run}").text
        assert "a retry does not change: 1" in page
        assert "--retry" not in page
        assert "/request" in page
        finish(lessee, leases)
        eventually(lambda: process.poll() is not None, 30)


def test_the_page_of_a_request_has_the_prompt_once_a_worker_has_the_request(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    lines = [chat_line("a"), chat_line("b"), chat_line("wrong", colour=1)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    store = BatchStore(redis_server.client(), ttl_ms=60_000)
    lessee = Lessee(client_of(store))
    with running(redis_server.url, source, tmp_path / "out.jsonl") as process:

        def run() -> Any:
            found = [one for one in store.batches() if one.fields["input"] == str(source)]
            return found[0] if found and found[0].number("total") == 3 else None

        url = f"{gateway.url}/ui/batches/{eventually(run, 30).id}"

        def page(custom_id: str) -> str:
            return httpx.get(f"{url}/request?id={custom_id}").text

        assert "once a worker has the request" in page("a")
        assert "Redis does not keep" not in page("a")
        # A row without a request has no prompt
        assert "status-failed" in page("wrong")
        assert "Redis does not keep" not in page("wrong")
        finish(lessee, lessee.pop(9))
        eventually(lambda: process.poll() is not None, 30)


def test_a_run_that_was_killed_waits_for_its_command(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    source = batch_file(tmp_path / "in.jsonl", 1700)
    store = BatchStore(redis_server.client(), ttl_ms=60_000)
    lessee = Lessee(client_of(store))

    def run() -> Any:
        found = [one for one in store.batches() if one.fields["input"] == str(source)]
        return found[0] if found and found[0].number("total") == 1000 else None

    with running(redis_server.url, source, tmp_path / "o.jsonl", "--window", "500") as process:
        name = eventually(run, 30).id
        process.kill()
        process.wait(30)
    while leases := lessee.pop(1000):
        finish(lessee, leases)
    page = httpx.get(f"{gateway.url}/ui/batches/{name}").text
    assert "What it has queued is done." in page
    assert "was interrupted" not in page
    overview = httpx.get(f"{gateway.url}/ui", follow_redirects=True).text
    assert "1 run has done what it has queued." in overview
    store.delete(name, force=True)


def test_the_page_of_a_cancelled_run_asks_for_its_command_until_the_output_is_written(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 600), tmp_path / "out.jsonl"
    store = BatchStore(redis_server.client(), ttl_ms=60_000)
    lessee = Lessee(client_of(store))

    def run() -> Any:
        found = [one for one in store.batches() if one.fields["input"] == str(source)]
        return found[0] if found and found[0].number("total") == 600 else None

    with running(redis_server.url, source, out, "--window", "500") as process:
        name = eventually(run, 30).id
    finish(lessee, lessee.pop(1), RequestFailed("it broke", code="request_failed"))
    while leases := lessee.pop(600):
        finish(lessee, leases)

    def shown() -> tuple[str, str, bool, bool]:
        """Return the API's state, and what the page has: its state and two texts."""
        state = httpx.get(f"{gateway.url}/v1/batches/{name}").json()["status"]
        page = httpx.get(f"{gateway.url}/ui/batches/{name}").text
        assert "was interrupted" not in page
        (tone,) = [one for one in ("cancelled", "partly") if f"status-{one}" in page]
        return state, tone, "start it once more" in page, "error_message" in page

    assert httpx.post(f"{gateway.url}/v1/batches/{name}/cancel").status_code == 200
    eventually(lambda: shown() == ("cancelled", "cancelled", True, False), 30)
    with running(redis_server.url, source, out, "--window", "500") as process:
        assert process.wait(30) == 1
    assert shown() == ("completed", "partly", False, True)


def test_the_total_of_a_run_whose_file_is_read_has_no_mark(
    gateway: GatewayProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    source = batch_file(tmp_path / "in.jsonl", 3)
    store = BatchStore(redis_server.client(), ttl_ms=60_000)
    lessee = Lessee(client_of(store))

    def page() -> str:
        runs = [one.id for one in store.batches() if one.fields["input"] == str(source)]
        return httpx.get(f"{gateway.url}/ui/batches/{runs[0]}").text if runs else ""

    with running(redis_server.url, source, tmp_path / "out.jsonl") as process:
        eventually(lambda: 'data-b="total">3<' in page(), 30)
        eventually(lambda: (finish(lessee, lessee.pop(9)), process.poll())[1] is not None, 30)
