"""Files and bodies that stand for much work: they end as their own error, and delay nobody else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from kit.gateways.batch_stack import BatchStack
from kit.hostile.bombs import MB, URL, bombs, line, zstd_of
from kit.hostile.hostile_request import deep

from demo.stack import eventually
from gateway.redis.api_keys import ApiKeys

#: What another tenant's batch of one line may take until it was looked through, in seconds.
PROMPT_S = 10


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchStack]:
    """Return the stack, with a worker and a batch runner."""
    found = BatchStack(tmp_path_factory.mktemp("stack"), runs_batches=True)
    found.worker.start()
    yield found
    found.close()


@pytest.fixture(scope="module")
def hostile(stack: BatchStack) -> openai.OpenAI:
    """Return the client of a tenant that sends bombs."""
    return stack.client_of(ApiKeys.using(stack.store).create("hostile")[0])


@pytest.fixture(scope="module")
def honest(stack: BatchStack, hostile: openai.OpenAI) -> openai.OpenAI:
    """Return the client of another tenant."""
    return stack.client_of(ApiKeys.using(stack.store).create("honest")[0])


def begun(client: openai.OpenAI, content: bytes, window: str = "24h") -> str:
    """Start a batch of a file."""
    uploaded = client.files.create(file=("in.jsonl", content), purpose="batch")
    window_: Any = window
    return client.batches.create(
        input_file_id=uploaded.id, endpoint=URL, completion_window=window_
    ).id


def is_ended(client: openai.OpenAI, batch_id: str, within_s: float = 60) -> Any:
    def look() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ("completed", "failed", "expired", "cancelled") else None

    return eventually(look, within_s, f"{batch_id} ends", every_s=0.1)


def looked_through_s(client: openai.OpenAI) -> float:
    """Return how long a batch of one line takes until it was looked through."""
    began = time.monotonic()
    batch_id = begun(client, line())

    def look() -> bool:
        return client.batches.retrieve(batch_id).status != "validating"

    eventually(look, 120, f"{batch_id} was looked through", every_s=0.05)
    return time.monotonic() - began


def test_each_bomb_ends_as_its_own_error_and_others_do_not_wait(
    stack: BatchStack, hostile: openai.OpenAI, honest: openai.OpenAI
) -> None:
    sent = [(name, begun(hostile, packed), code, told) for name, packed, code, told in bombs()]
    waited = [looked_through_s(honest) for _ in range(5)]
    for name, batch_id, code, told in sent:
        batch = is_ended(hostile, batch_id)
        assert batch.status == "failed", name
        assert batch.errors.data[0].code == code, name
        assert told in batch.errors.data[0].message, name
    assert max(waited) < PROMPT_S
    assert "Traceback" not in stack.gateway.log_path.read_text()


def test_a_line_nested_deep_is_its_own_error(hostile: openai.OpenAI) -> None:
    deep = line(1, response_format=0).replace(
        b'"response_format": 0', b'"response_format":' + b'{"a":' * 900 + b"1" + b"}" * 900
    )
    batch = is_ended(hostile, begun(hostile, line(0) + deep + line(2)))
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    assert "deep" in hostile.files.content(batch.error_file_id).text


def heavy() -> bytes:
    """Return a small file that is honest in form, and takes long to look through."""
    filler = " " * (9 * MB)
    lines = (
        line(number).replace(b', "url"', filler.encode() + b', "url"') for number in range(110)
    )
    return zstd_of(b"".join(lines), 1)


def test_a_batch_that_takes_long_is_cancelled_at_once_and_delays_nobody(
    hostile: openai.OpenAI, honest: openai.OpenAI
) -> None:
    packed = heavy()
    sent = [begun(hostile, packed) for _ in range(6)]
    assert looked_through_s(honest) < PROMPT_S
    for batch_id in sent:
        hostile.batches.cancel(batch_id)
    began = time.monotonic()
    for batch_id in sent:
        assert is_ended(hostile, batch_id, 30).status == "cancelled"
    assert time.monotonic() - began < 5


def test_behind_many_batches_of_a_tenant_another_one_has_its_turn(
    hostile: openai.OpenAI, honest: openai.OpenAI
) -> None:
    file_id = hostile.files.create(file=("in.jsonl", line()), purpose="batch").id
    url = str(hostile.base_url)
    asked = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
    headers = {"Authorization": f"Bearer {hostile.api_key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
        made = [client.post("batches", json=asked) for _ in range(400)]
    assert {answer.status_code for answer in made} == {200}
    assert looked_through_s(honest) < 3
    for answer in made:
        is_ended(hostile, answer.json()["id"])


DEEP_PATHS = [
    "batches", "uploads", "uploads/{upload}/complete", "uploads/{upload}/cancel",
    "messages/batches", "chat/completions", "messages",
]  # fmt: skip


@pytest.mark.parametrize("path", DEEP_PATHS)
@pytest.mark.parametrize("depth", [900, 5000, 100_000])
@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")])
def test_a_body_nested_deep_is_a_400(
    stack: BatchStack, hostile: openai.OpenAI, path: str, depth: int, opening: bytes, closing: bytes
) -> None:
    upload = hostile.uploads.create(bytes=1, filename="x", mime_type="x", purpose="batch").id
    body = b'{"model":"m","x":' + deep(depth, opening, closing) + b"}"
    before = peak_kb(stack)
    began = time.monotonic()
    answer = httpx.post(
        f"{hostile.base_url}{path.format(upload=upload)}", content=body, timeout=30,
        headers={"Authorization": f"Bearer {hostile.api_key}", "Content-Type": "application/json"},
    )  # fmt: skip
    # No field of a cancel is read.
    assert answer.status_code == (200 if path.endswith("cancel") else 400), answer.text
    assert time.monotonic() - began < 5
    assert peak_kb(stack) - before < 100 * 1024


def peak_kb(stack: BatchStack) -> int:
    """Return the most memory that the gateway has had."""
    assert stack.gateway.process is not None
    status = Path(f"/proc/{stack.gateway.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


PART = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
GOOD = (
    PART % (b"purpose", b"", b"batch") + PART % (b"file", b'; filename="x"', line()) + b"--b--\r\n"
)


@pytest.mark.parametrize(
    "content",
    [
        b"--b\r\n\r\n\r\n" * MB + GOOD,
        (PART % (b"", b"", b"")) * 50_000 + GOOD,
        b"\r\n" * 5 * MB + GOOD,
        GOOD + b"x" * 10 * MB,
        GOOD + b"\r\n" * 5 * MB,
        b"--b\r\nx: " + b"y" * 10 * MB + b"\r\n\r\n\r\n" + GOOD,
        b"--b\r\n" + b"x: y\r\n" * MB + b"\r\n\r\n" + GOOD,
        (PART % (b"purpose", b"", b"a" * 10 * MB)) + GOOD,
    ],
    ids=["no headers", "parts", "before", "behind", "lines behind", "header", "headers", "field"],
)
def test_a_form_is_counted_with_all_that_is_not_its_file(
    hostile: openai.OpenAI, content: bytes
) -> None:
    answer = httpx.post(
        f"{hostile.base_url}files", content=content, timeout=30,
        headers={
            "Authorization": f"Bearer {hostile.api_key}",
            "Content-Type": "multipart/form-data; boundary=b",
        },
    )  # fmt: skip
    assert answer.status_code == 400, answer.text


def test_forms_of_one_tenant_delay_nobody(hostile: openai.OpenAI, honest: openai.OpenAI) -> None:
    headers = {
        "Authorization": f"Bearer {hostile.api_key}",
        "Content-Type": "multipart/form-data; boundary=b",
    }

    def send() -> int:
        content = b"--b\r\n\r\n\r\n" * 3 * MB
        url = f"{hostile.base_url}files"
        return httpx.post(url, content=content, headers=headers, timeout=60).status_code

    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(send) for _ in range(4)]
        waited = []
        while not all(one.done() for one in sent):
            began = time.monotonic()
            honest.models.list()
            waited.append(time.monotonic() - began)
    assert {one.result() for one in sent} == {400}
    assert max(waited, default=0) < 2
