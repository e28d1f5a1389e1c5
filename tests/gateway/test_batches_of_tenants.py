"""What one tenant owns no other can see, list, page over, cancel or fetch."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import openai
import pytest
from kit.gateways.batch_stack import BatchStack

from gateway.redis.api_keys import ApiKeys


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchStack]:
    """Return the stack, without a running worker."""
    found = BatchStack(tmp_path_factory.mktemp("stack"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def clients(stack: BatchStack) -> tuple[openai.OpenAI, openai.OpenAI]:
    """Return the clients of two tenants, `a` and `b`; `b` may ask for priority 5 at most."""
    keys = ApiKeys.using(stack.store)
    a, b = keys.create("a")[0], keys.create("b", highest_priority=5)[0]
    return stack.client_of(a), stack.client_of(b)


def made_by(stack: BatchStack, client: openai.OpenAI, **fields: object) -> str:
    """Create a batch of a tenant."""
    batch = client.batches.create(
        input_file_id=stack.uploaded(client),
        endpoint="/v1/chat/completions", completion_window="24h", **fields,
    )  # fmt: skip
    return batch.id


def test_batches_of_another_tenant_are_not_there(
    stack: BatchStack, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    a, b = clients
    mine, theirs = made_by(stack, a), made_by(stack, b)
    stack.store.create("queued-b", "0" * 40, {"tenant": "b", "queue": "warmq"})
    assert mine in [batch.id for batch in a.batches.list()]
    assert {"queued-b", theirs} <= {batch.id for batch in b.batches.list()}
    for foreign in (theirs, "queued-b"):
        assert foreign not in [batch.id for batch in a.batches.list()]
        for ask in (a.batches.retrieve, a.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(foreign)
        with pytest.raises(openai.NotFoundError):
            a.batches.list(after=foreign)
        for kind in ("out", "err", "partial"):
            with pytest.raises(openai.NotFoundError):
                a.files.content(f"file-{kind}-{foreign}")
    assert b.batches.retrieve(theirs).status == "validating"


def test_a_file_of_another_tenant_is_no_input(
    stack: BatchStack, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    a, b = clients
    told = set()
    for file_id in (stack.uploaded(b), "file-of-nobody"):
        with pytest.raises(openai.NotFoundError) as caught:
            a.batches.create(
                input_file_id=file_id, endpoint="/v1/embeddings", completion_window="24h"
            )
        told.add(str(caught.value).replace(file_id, "..."))
    assert len(told) == 1, "the two look alike"


def test_the_same_idempotency_key_of_two_tenants_makes_two_batches(
    stack: BatchStack, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    headers = {"Idempotency-Key": "same"}
    ids = {made_by(stack, client, extra_headers=headers) for client in clients * 2}
    assert len(ids) == 2


def test_a_priority_that_a_key_does_not_allow_is_a_403(
    stack: BatchStack, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    _, b = clients
    with pytest.raises(openai.PermissionDeniedError) as caught:
        made_by(stack, b, extra_body={"priority": 4})
    assert caught.value.param == "priority"
    assert made_by(stack, b, extra_body={"priority": 5})


@pytest.mark.parametrize(("tenant", "option"), [("new", " --tenant new"), ("default", "")])
def test_the_command_on_an_empty_page_submits_for_the_tenant_that_sees_the_page(
    stack: BatchStack, tenant: str, option: str
) -> None:
    secret = ApiKeys.using(stack.store).create(tenant)[0]
    with httpx.Client(base_url=stack.gateway.url, timeout=30) as browser:
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', browser.get("/ui/login").text)
        assert found
        form = {"key": secret, "csrf": found[1], "next": "/ui"}
        assert browser.post("/ui/login", data=form).status_code == 303
        for path in ("/ui", "/ui/batches", "/ui/submit"):
            assert f"<code>producer submit requests.jsonl{option}</code>" in browser.get(path).text
