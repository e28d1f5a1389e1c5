"""What gateways do with batches, in a real Redis: creates sent again, partial results, `once`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.once import ASKED, ONCE, six_lines
from kit.commands.submitting import submit
from kit.commands.support import finish, run_all
from kit.gateways.own_batch_runner import opened, uploaded
from kit.protocol.lessee import Lessee, client_of, submit_batch
from starlette.responses import Response, StreamingResponse

from contract.errors import RequestFailed, RequestRejected
from gateway.batches.api import batches, virtual_files
from gateway.batches.api.record import BatchPart, BatchRecord, RequestCounts, Usage, encode
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.http.services import Services

CALLER = Caller()
BODY = orjson.dumps({
    "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"
})  # fmt: skip


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    """Return what handlers work with."""
    with opened(redis_url, tmp_path) as found:
        uploaded(found, [], tenant="default")
        yield found


def put(services: Services, batch_id: str = "batch_1", **fields: Any) -> None:
    """Write a batch as a gateway does."""
    record = BatchRecord(
        id=batch_id, tenant="default", endpoint="/v1/chat/completions", input_file_id="file-1",
        completion_window="24h", created_at=1000, expires_at=87_400, **fields,
    )  # fmt: skip
    stored = services.objects.get("batch", "default", batch_id)
    if stored is None:
        services.objects.create("batch", "default", batch_id, 1000, encode(record))
    else:
        services.objects.replace("batch", "default", stored, encode(record), 1000)


async def body_of(response: Response) -> list[dict[str, Any]]:
    """Return the lines of a streamed answer."""
    assert isinstance(response, StreamingResponse)
    body = b"".join([bytes(chunk) async for chunk in response.body_iterator])
    return [orjson.loads(line) for line in body.splitlines()]


async def partial(
    services: Services, file_id: str, offset: int = 0
) -> tuple[list[str], int, str | None]:
    """Return the custom_ids of what has ended from an offset on, and the two markers."""
    response = virtual_files.content(services, CALLER, file_id, offset)
    names = [line["custom_id"] for line in await body_of(response)]
    return names, int(response.headers["x-last-line"]), response.headers["x-incomplete"]


def test_a_create_sent_again_finds_its_batch_although_its_file_has_gone(
    services: Services,
) -> None:
    first = batches.create(services, CALLER, BODY, "key")
    services.objects.delete("file", "default", "file-1")
    assert batches.create(services, CALLER, BODY, "key").id == first.id
    with pytest.raises(ApiError, match="No such file"):
        batches.create(services, CALLER, BODY, "another")
    page = batches.page(services, CALLER, "", 10)
    assert [batch.id for batch in page.data] == [first.id]
    assert services.due.claim("batch", 1000, 5)[0].id == first.id


def test_a_create_without_a_key_makes_another_batch_each_time(services: Services) -> None:
    assert len({batches.create(services, CALLER, BODY, "").id for _ in range(5)}) == 5


def test_counts_and_usage_are_live_while_a_batch_runs_and_final_afterwards(
    services: Services,
) -> None:
    parts = [BatchPart("batch_1", "m", "warmq"), BatchPart("batch_1.1", "n", "warmq")]
    put(services, status="in_progress", parts=parts, counts=RequestCounts(total=5))
    for part, lines in ((parts[0], 3), (parts[1], 2)):
        submit_batch(services.batches, lines, batch_id=part.batch_id)
    lessee = Lessee(client_of(services.batches))
    first, *rest = lessee.pop(4)
    finish(lessee, [first], RequestRejected("bad"))
    finish(lessee, rest)
    shown = batches.retrieve(services, CALLER, "batch_1")
    counts = shown.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 3, 1)
    assert (shown.usage.input_tokens, shown.usage.output_tokens) == (12, 8)
    assert shown.output_file_id is None
    put(services, status="completed", parts=parts, counts=RequestCounts(5, 4, 1),
        usage=Usage(12, 8, 5, 1), output_file_id="file-9", changed_at={"completed": 7})  # fmt: skip
    shown = batches.retrieve(services, CALLER, "batch_1", partial=True)
    assert (shown.status, shown.completed_at, shown.output_file_id) == ("completed", 7, "file-9")
    assert shown.request_counts.completed == 4
    assert shown.usage.input_tokens_details.cached_tokens == 5


async def test_positions_in_partial_results_of_several_models_stay_as_they_were(
    services: Services,
) -> None:
    parts = [BatchPart("batch_1", "m", "warmq.m"), BatchPart("batch_1.1", "n", "warmq.n")]
    put(services, status="in_progress", parts=parts)
    queues = ("warmq.m", "warmq.n")
    for part, queue in zip(parts, queues, strict=True):
        submit_batch(services.batches, 40, batch_id=part.batch_id, queue=queue)
    lessees = [Lessee(client_of(services.batches), f"w{q}", q) for q in queues]
    read: list[str] = []
    for turn in range(30):
        of = turn % 3 % 2  # two turns of the one, a turn of the other
        finish(lessees[of], lessees[of].pop(2))
        if turn % 4 == 0:
            continue
        names, end, incomplete = await partial(services, "file-partial-batch_1", len(read))
        assert incomplete == "true"
        read += names
        assert len(read) == end
        assert (await partial(services, "file-partial-batch_1"))[0] == read
    for queue in queues:
        run_all(services.batches, queue)
    names, end, _ = await partial(services, "file-partial-batch_1", len(read))
    read += names
    assert len(read) == end == 80
    assert sorted(read) == sorted([f"c{n}" for n in range(1, 41)] * 2)
    for at in range(81):
        assert (await partial(services, "file-partial-batch_1", at))[0] == read[at:]
    assert client_of(services.batches).pttl("warmq:gateway:partial:batch_1") > 0


async def test_partial_results_of_once_have_the_followers_too(
    services: Services, tmp_path: Path
) -> None:
    put(services, "b1", status="in_progress", parts=[BatchPart("b1", "", "warmq")])
    submit(services.batches, six_lines(tmp_path / "in.jsonl"), ONCE)
    lessee = Lessee(client_of(services.batches))
    finish(lessee, lessee.pop(1))
    names, end, _ = await partial(services, "file-partial-b1")
    assert names == ["a", "c", "f"]
    finish(lessee, lessee.pop(5))
    rest, _, _ = await partial(services, "file-partial-b1", end)
    assert sorted(names + rest) == sorted(ASKED)


async def test_partial_results_have_failures_in_openais_form(services: Services) -> None:
    put(services, status="in_progress", parts=[BatchPart("batch_1", "", "warmq")])
    submit_batch(services.batches, 2, batch_id="batch_1")
    lessee = Lessee(client_of(services.batches))
    finish(lessee, lessee.pop(1), RequestFailed("no"))
    (line,) = await body_of(
        virtual_files.content(services, CALLER, "file-partial-batch_1", 0)
    )  # fmt: skip
    assert line["response"]["status_code"] == 500


async def test_partial_results_before_and_after_a_batch_is_in_the_queue(
    services: Services,
) -> None:
    put(services)
    assert await partial(services, "file-partial-batch_1") == ([], 0, "true")
    parts = [BatchPart("batch_1", "", "warmq")]
    put(services, status="in_progress", parts=parts)
    assert await partial(services, "file-partial-batch_1", 3) == ([], 3, "true")
    put(services, status="completed", parts=parts, output_file_id="file-9")
    response = virtual_files.content(services, CALLER, "file-partial-batch_1", 0)
    assert (response.status_code, response.headers["location"]) == (307, "/v1/files/file-9/content")
    with pytest.raises(ApiError) as caught:
        virtual_files.content(services, CALLER, "file-partial-batch_1", 3)
    assert (caught.value.status, caught.value.code) == (404, "batch_ended")


def test_a_batch_that_has_ended_cannot_be_cancelled(services: Services) -> None:
    for status in ("completed", "failed", "expired"):
        put(services, f"batch_{status}", status=status)
        with pytest.raises(ApiError) as caught:
            batches.cancel(services, CALLER, f"batch_{status}")
        assert caught.value.status == 400
    put(services, "batch_cancelled", status="cancelled")
    assert batches.cancel(services, CALLER, "batch_cancelled")[0].status == "cancelled"


def test_a_submitted_batch_of_bad_lines_alone_has_failed_and_says_why(
    services: Services, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("no json\n" * 3)
    submit(services.batches, path)
    batch = batches.retrieve(services, CALLER, "b1")
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.errors is not None
    assert batch.errors.data[0].message
    assert batch.failed_at is not None
    assert batch.error_file_id == "file-err-b1"


def test_an_output_whose_batch_is_deleted_meanwhile_is_not_there(services: Services) -> None:
    submit_batch(services.batches, 3)
    run_all(services.batches)
    assert batches.retrieve(services, CALLER, "b1").output_file_id == "file-out-b1"
    services.batches.delete("b1")
    with pytest.raises(ApiError) as caught:
        virtual_files.content(services, CALLER, "file-out-b1", 0)
    assert caught.value.status == 404
