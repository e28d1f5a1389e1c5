"""A gateway that dies before any one of its steps leaves nothing that nobody would remove."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from kit.commands.support import chat_line
from kit.verdicts.owners import ownerless

from contract.redis.client import Client, _Pipeline
from gateway.batches.anthropic import batches as message_batches
from gateway.batches.api import batches
from gateway.batches.runner.runner import BatchRunner
from gateway.file_store import Folder, Writer
from gateway.files import uploads
from gateway.files.files import FileRecord, Files, save_file
from gateway.files.uploads import UploadComplete, UploadCreate
from gateway.http.caller import Caller
from gateway.http.services import Services
from gateway.online.request import read
from gateway.online.responses import calls
from gateway.sweeping import look_at_responses, remove_expired_files

CALLER = Caller(tenant="t")
LINE = orjson.dumps(chat_line("a", model="small")) + b"\n"
#: What a process asks of Redis and of its store, one step after the other.
STEPS = (
    (Client, "execute_command"),
    (_Pipeline, "execute"),
    (Writer, "commit"),
    (Folder, "delete"),
)


class Died(BaseException):
    """The process is gone; nothing that catches errors runs after it."""


def dies_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Let so many steps be done, and no further one."""
    left = [steps]

    def counted(done: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **more: Any) -> Any:
            if not left[0]:
                raise Died
            left[0] -= 1
            return done(*args, **more)

        return step

    for owner, name in STEPS:
        patch.setattr(owner, name, counted(getattr(owner, name)))


def write(services: Services, name: str = "file-1") -> FileRecord:
    with services.store.write(name) as writer:
        writer.write(LINE)
        record = record_of(name)
        return save_file(services, CALLER, writer, record)


def record_of(name: str) -> FileRecord:
    return FileRecord(
        id=name, tenant=CALLER.tenant, bytes=len(LINE), created_at=1, filename="in.jsonl",
        purpose="batch",
    )  # fmt: skip


def upload(services: Services) -> None:
    asked = UploadCreate(
        bytes=len(LINE), filename="in.jsonl", mime_type="application/jsonl", purpose="batch"
    )
    begun = uploads.create(services, CALLER, asked, "upload_1")
    with services.store.write("part_1") as writer:
        writer.write(LINE)
        uploads.add_part(services, CALLER, begun.id, "part_1", len(LINE))
        writer.commit()
    uploads.complete(services, CALLER, begun.id, UploadComplete(part_ids=["part_1"]))


def delete(services: Services) -> None:
    Files(services).delete(CALLER.tenant, "file-0")


def create(services: Services) -> None:
    body = {"input_file_id": "file-0", "endpoint": "/v1/chat/completions",
            "completion_window": "24h"}  # fmt: skip
    batches.create(services, CALLER, orjson.dumps(body), "")


def message_batch(services: Services) -> None:
    with services.store.write("file-1") as writer:
        writer.write(LINE)
        message_batches.create(services, CALLER, "msgbatch_1", writer, record_of("file-1"), total=1)


def message_batch_deleted(services: Services) -> None:
    message_batch(services)
    (read,) = services.objects.get_many("batch", ["msgbatch_1"])
    assert read is not None
    ended = orjson.dumps(orjson.loads(read.document) | {"status": "completed"})
    services.objects.replace("batch", CALLER.tenant, read, ended, 1)
    message_batches.delete(services, CALLER, "msgbatch_1")


def response(services: Services) -> dict[str, Any]:
    body = orjson.dumps({"model": "m", "input": "Hello", "background": True})
    return calls.create(services, CALLER, read("/v1/responses", body, 0), "warmq", "")


def response_cancelled(services: Services) -> None:
    calls.cancel(services, CALLER, response(services)["id"])


def response_deleted(services: Services) -> None:
    calls.delete(services, CALLER, response(services)["id"])


def live_on(services: Services, redis_client: redis.Redis) -> None:
    """Do what gateways that live do in the hour that follows."""
    for kind in ("file", "upload", "batch", "response"):
        key = f"warmq:gateway:due:{kind}"
        if due := redis_client.zrange(key, 0, -1):
            redis_client.zadd(key, dict.fromkeys(due, 1), xx=True)
    remove_expired_files(services)
    look_at_responses(services)
    with ThreadPoolExecutor(1) as pool:
        BatchRunner(services)._claim_and_run(pool)


def contents_without_owner(redis_client: redis.Redis, folder: Path) -> set[str]:
    owned = {key.decode().rpartition(":")[2] for key in redis_client.keys("warmq:gateway:file:*")}
    for key in redis_client.keys("warmq:gateway:upload:*"):
        owned |= set(orjson.loads(redis_client.hget(key, "document") or b"{}").get("parts", ()))
    return {path.name for path in folder.iterdir()} - owned


@pytest.mark.parametrize(
    "does",
    [write, upload, delete, create, message_batch, message_batch_deleted, response,
     response_cancelled, response_deleted],
    ids=lambda does: does.__name__,
)  # fmt: skip
def test_a_gateway_may_die_before_any_step(
    does: Callable[[Services], object], services: Services, redis_client: redis.Redis,
    tmp_path: Path,
) -> None:  # fmt: skip
    def begin() -> None:
        redis_client.flushall()
        for path in (tmp_path / "files").iterdir():
            path.unlink()
        write(services, "file-0")
        live_on(services, redis_client)  # then nobody looks at that file any more by himself

    begin()
    does(services)  # then Redis has all scripts, and each of them is one step
    found: dict[int, Any] = {}
    for steps in range(200):
        begin()
        with pytest.MonkeyPatch.context() as patch:
            dies_after(patch, steps)
            try:
                does(services)
                survived = True
            except Died:
                survived = False
        live_on(services, redis_client)
        left = ownerless(redis_client)
        orphans = contents_without_owner(redis_client, tmp_path / "files")
        if left or orphans:
            found[steps] = left, orphans
        if survived:
            break
    assert survived and steps
    assert found == {}
