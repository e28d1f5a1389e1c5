"""What was deleted stays so: a part of a batch in the queue, and an output that its owner has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import orjson
import pytest
import redis
from kit.commands.support import chat_line, run_all
from kit.gateways.own_batch_runner import content, created, looked_at, until_ended

from gateway.batches.api.record import BatchPart, BatchRecord, decode, encode, request_cancel
from gateway.batches.runner.outputs import _File, file_id_of
from gateway.files.files import Files
from gateway.http.services import Services

LINES = 5


def looked_through(services: Services, parts: int = 1) -> None:
    """Write a batch whose file was looked through, with as many lines for each part."""
    models = [f"m{n}" for n in range(parts)]
    content(services, [
        chat_line(f"{model}-{n}", model=model) for n in range(LINES) for model in models
    ])  # fmt: skip
    created(services, status="in_progress", parts=[
        BatchPart(f"batch_1.{n}" if n else "batch_1", model, "warmq", [model])
        for n, model in enumerate(models)
    ])  # fmt: skip


def waiting(client: redis.Redis) -> int:
    return sum(client.llen(key) for key in client.keys("warmq\x06\x16*"))


@pytest.mark.parametrize("how", ["cancelled", "forced", "expired"])
def test_a_part_that_was_deleted_is_not_queued_again(
    services: Services, redis_client: redis.Redis, how: str
) -> None:
    looked_through(services)
    assert looked_at(services).parts[0].made
    assert waiting(redis_client) == LINES
    store = services.batches
    batch = store.batch("batch_1")
    assert batch is not None
    if how == "expired":  # no gateway ran until the results' life had ended
        for key in redis_client.keys("warmq:batch:batch_1*"):
            redis_client.delete(key)
    else:
        store.cancel(batch)
        assert store.delete("batch_1", force=how == "forced")
    record = until_ended(services)
    assert record.status == "failed"
    assert [problem.code for problem in record.problems] == ["batch_deleted"]
    assert "deleted" in record.problems[0].message
    assert store.batch("batch_1") is None
    assert record.counts.total == record.counts.failed == LINES
    assert record.error_file_id is not None
    with services.store.local(record.error_file_id) as path:
        codes = {orjson.loads(line)["error"]["code"] for line in path.read_bytes().splitlines()}
    assert codes == {"batch_cancelled"}


def test_the_results_of_the_other_parts_are_kept(
    services: Services, redis_client: redis.Redis
) -> None:
    looked_through(services, parts=2)
    looked_at(services)
    store = services.batches
    second = store.batch("batch_1.1")
    assert second is not None
    store.cancel(second)
    assert store.delete("batch_1.1")
    run_all(store)
    record = until_ended(services)
    assert record.status == "failed"
    assert "batch_1.1" in record.problems[0].message
    assert record.counts.failed >= LINES
    assert store.batch("batch_1.1") is None


def test_a_batch_is_cancelled_in_a_full_redis(
    services: Services, redis_client: redis.Redis
) -> None:
    """Also one of which nothing was queued yet."""
    looked_through(services)
    redis_client.config_set("maxmemory", redis_client.info("memory")["used_memory"] // 2)
    try:
        assert request_cancel(services, "t", "batch_1") is not None
        record = until_ended(services)
    finally:
        redis_client.config_set("maxmemory", 0)
    assert record.status == "cancelled"
    assert record.counts.failed == LINES


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_batch_runner_that_was_paused_does_not_bring_a_deleted_output_back(
    services: Services, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: str
) -> None:
    """Paused around the commit of the content: another one ends the batch, its owner has read and
    deleted the output by the time that the first one goes on."""
    looked_through(services)
    looked_at(services)
    run_all(services.batches)
    ended_by_another: list[BatchRecord] = []

    def another_ends() -> None:
        read = services.objects.get("batch", "t", "batch_1")
        assert read is not None
        anew = msgspec.structs.replace(decode(read.document), status="completed")
        assert services.objects.replace("batch", "t", read, encode(anew), anew.created_at)
        ended_by_another.append(anew)

    counted = services.limits.count_bytes
    commit = _File.commit

    def commits(file: _File) -> str | None:
        if moment == "before" and not ended_by_another:
            another_ends()
        return commit(file)

    def counts(tenant: str, file_id: str, size: int) -> None:
        counted(tenant, file_id, size)
        if moment == "after" and not ended_by_another:
            another_ends()

    monkeypatch.setattr(_File, "commit", commits)
    monkeypatch.setattr(services.limits, "count_bytes", counts)
    record = looked_at(services)
    assert record == ended_by_another[0]
    files = Files(services)
    page = files.page("t", "", 10, oldest_first=False, purpose=None)
    assert page == ([], False)
    services.objects.forget_reader("file-1", "batch_1")
    services.batches._client.zadd(
        "warmq:gateway:due:file", {file_id_of("batch_1", "output"): 0, "file-1": 0}
    )
    files.remove_expired()
    assert [path.name for path in (tmp_path / "files").iterdir()] == []
