"""What pages read of files has a bound, and takes nobody else's time; their streams hold."""

from __future__ import annotations

import gzip
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlencode

import httpx
import pytest
from kit.gateways.batch_stack import BatchStack
from kit.hostile.bombs import MB, bombs, line, zstd_of

from contract.redis.objects import Stored
from gateway.batches.api.record import decode
from gateway.redis.batch_views import BatchViews


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchStack]:
    """Return the stack, with a worker and a batch runner."""
    found = BatchStack(tmp_path_factory.mktemp("stack"), runs_batches=True)
    found.worker.start()
    yield found
    found.close()


@pytest.fixture
def page(stack: BatchStack) -> Iterator[httpx.Client]:
    """Return a browser without scripts."""
    with httpx.Client(base_url=stack.gateway.url, timeout=60, follow_redirects=True) as client:
        yield client


def sent(stack: BatchStack, content: bytes) -> str:
    return stack.client.files.create(file=("in.jsonl", content), purpose="batch").id


def wide() -> bytes:
    """Return some kB that stand for a GB of good lines."""
    filler = b" " * (9 * MB)
    lines = (line(n).replace(b', "url"', filler + b', "url"') for n in range(110))
    return zstd_of(b"".join(lines), 1)


def test_the_page_says_of_each_bomb_why_it_has_no_plan(
    stack: BatchStack, page: httpx.Client
) -> None:
    for name, content, _, told in bombs():
        file_id = sent(stack, content)
        began = time.monotonic()
        answer = page.get("/ui/submit", params={"file": file_id})
        assert answer.status_code == 200, name
        if told == "blank lines":
            assert re.search("blank lines|too much to plan it on this page", answer.text), name
        assert time.monotonic() - began < 15, name


def test_what_a_file_names_need_not_be_text(stack: BatchStack, page: httpx.Client) -> None:
    content = b'{"custom_id":"a","url":[1],"body":{"model":[1]}}\n{"url":{"a":1}}\n'
    content += b'{"url":' + b"[" * 5000 + b"\n" + line(1)
    assert page.get("/ui/submit", params={"file": sent(stack, content)}).status_code == 200


def test_plans_are_made_one_after_the_other_and_end_with_their_clients(
    stack: BatchStack, page: httpx.Client
) -> None:
    files = [sent(stack, line(n) + b"".join(map(line, range(100_000)))) for n in range(4)]

    def give_up(number: int) -> None:
        with suppress(httpx.TimeoutException):
            httpx.get(
                f"{stack.gateway.url}/ui/submit", params={"file": files[number % 4]}, timeout=1
            )

    with ThreadPoolExecutor(45) as pool:
        sent_off = [pool.submit(give_up, number) for number in range(45)]
        waited = []
        while not all(one.done() for one in sent_off):
            began = time.monotonic()
            stack.client.batches.list(limit=1)
            waited.append(time.monotonic() - began)
    began = time.monotonic()
    assert page.get("/ui/batches").status_code == 200
    assert max(waited, default=0) < 5
    assert time.monotonic() - began < 5


def test_what_comes_out_of_a_file_is_what_counts_as_its_size(
    stack: BatchStack, page: httpx.Client
) -> None:
    file_id = sent(stack, wide())
    for _ in range(2):
        answer = page.get("/ui/submit", params={"file": file_id})
        assert "too much to plan it on this page" in answer.text
    good = sent(stack, gzip.compress(line(1) + line(2)))
    assert "Prompt tokens" in page.get("/ui/submit", params={"file": good}).text


def test_failed_lines_of_a_compressed_file_are_run_again(
    stack: BatchStack, page: httpx.Client
) -> None:
    bad = line(2, user="simulate:fail")
    batch = stack.client.batches.create(
        input_file_id=sent(stack, gzip.compress(line(1) + b"\n" + bad)),
        endpoint="/v1/chat/completions", completion_window="24h",
        output_expires_after={"anchor": "created_at", "seconds": 7200}, extra_body={"priority": 3},
    )  # fmt: skip
    assert stack.ended(batch.id).request_counts.failed == 1
    form = page.get(f"/ui/batches/{batch.id}").text
    (csrf,) = set(re.findall(r'name="csrf" value="([^"]+)"', form))
    answer = page.post(f"/ui/batches/{batch.id}/retry", data={"csrf": csrf})
    assert answer.status_code == 200, answer.text
    again = stack.client.batches.retrieve(answer.url.path.rpartition("/")[2])
    assert again.metadata == {"failed_lines_of": batch.id}
    assert stack.client.files.content(again.input_file_id).content == bad
    ended = stack.ended(again.id)
    errors = stack.client.files.retrieve(ended.error_file_id or "")
    assert errors.expires_at is not None
    assert 7200 <= errors.expires_at - ended.created_at < 7300
    of = BatchViews.using(stack.store)
    views = [of.get("default", one) for one in (batch.id, again.id)]
    documents = [view.source.document for view in views if view and isinstance(view.source, Stored)]
    assert [decode(document).priority for document in documents] == [3, 3]


def test_the_stream_of_a_batch_that_is_looked_through_goes_on(stack: BatchStack) -> None:
    batch = stack.client.batches.create(
        input_file_id=sent(stack, wide()), endpoint="/v1/chat/completions",
        completion_window="24h",
    )  # fmt: skip
    asked = urlencode({"batches": batch.id, "request": "r1", "of": batch.id})
    got, until = b"", time.monotonic() + 2
    with urllib.request.urlopen(f"{stack.gateway.url}/ui/live?{asked}", timeout=30) as answer:
        while time.monotonic() < until:
            piece = answer.readline()
            assert piece, f"the stream has ended: {got!r}"
            got += piece
    stack.client.batches.cancel(batch.id)
    assert b"event:" in got
    assert "Traceback" not in stack.gateway.log_path.read_text()


def test_a_stream_that_is_asked_for_its_head_leaves_the_connection_usable(
    page: httpx.Client,
) -> None:
    for _ in range(3):
        assert page.head("/ui/live").headers["content-type"].startswith("text/event-stream")
        assert page.get("/ui/workers", timeout=10).status_code == 200
