"""An Idempotency-Key with another body never gets what was made of the first one, however long ago
that was, and whatever was answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest
from kit.commands.support import chat_line
from kit.gateways.live_stack import HELLO, MODEL, Stack

from demo.stack import eventually


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A gateway that answers 503 after two seconds, and a worker that may be started."""
    folder = tmp_path_factory.mktemp("bodies")
    with Stack(folder, gateway_models=MODEL, gateway_online_timeout_s=2) as made:
        yield made


def forget(stack: Stack) -> None:
    """Forget all tries, as after 25 hours, or after an answer that may change."""
    client = stack.store._client
    for key in client.scan_iter("warmq:gateway:idempotent:*"):
        client.delete(key)


def post(stack: Stack, path: str, key: str, **sent: Any) -> httpx.Response:
    headers = {"idempotency-key": key}
    return httpx.post(stack.gateway.url + path, headers=headers, timeout=30, **sent)


def file_of(stack: Stack, key: str, content: bytes, name: str = "a.jsonl", **more: str) -> Any:
    fields = {"purpose": "batch"} | more
    return post(stack, "/v1/files", key, files={"file": (name, content)}, data=fields)


ONLINE: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda t: {"messages": [{"role": "user", "content": t}]},
    "/v1/responses": lambda t: {"input": t},
    "/v1/messages": lambda t: {"max_tokens": 9, "messages": [{"role": "user", "content": t}]},
    "/v1/completions": lambda t: {"prompt": t},
}


@pytest.mark.parametrize("path", list(ONLINE))
def test_after_a_503_another_body_has_its_own_answer(stack: Stack, path: str) -> None:
    def asked(text: str) -> httpx.Response:
        body = {"model": MODEL} | ONLINE[path](text)
        return post(stack, path, f"online {path}", json=body)

    assert stack.worker.process is not None
    stack.worker.process.send_signal(19)  # SIGSTOP: nobody answers
    try:
        assert asked("first").status_code == 503
    finally:
        stack.worker.process.send_signal(18)  # SIGCONT
    own = {text: httpx.post(stack.gateway.url + path, json={"model": MODEL} | ONLINE[path](text),
                            timeout=30) for text in ("first", "other")}  # fmt: skip
    other = asked("other")
    assert other.status_code == 200
    assert text_of(other) == text_of(own["other"]) != text_of(own["first"])
    assert asked("first").status_code == 409  # the key is the other one's now
    forget(stack)
    again = asked("first")  # its answer is in Redis, under an id of its own
    assert text_of(again) == text_of(own["first"])


def text_of(answer: httpx.Response) -> str:
    """Return what the simulated engine has written, without ids and times."""
    found = answer.text.partition("simulated ")[2][:16]
    assert len(found) == 16, answer.text
    return found


def test_a_retry_of_the_same_body_still_gets_the_first_requests_answer(stack: Stack) -> None:
    body = {"model": MODEL, "messages": HELLO}
    first = post(stack, "/v1/chat/completions", "same", json=body)
    started = stack.started()
    forget(stack)
    again = post(stack, "/v1/chat/completions", "same", json=body)
    assert again.json()["id"] == first.json()["id"]
    assert stack.started() == started


def test_after_a_day_another_file_is_no_longer_the_old_one(stack: Stack) -> None:
    first = file_of(stack, "file", b"abc")
    forget(stack)
    for other in (
        file_of(stack, "file", b"abd"),
        file_of(stack, "file", b"abc", name="b.jsonl"),
        file_of(stack, "file", b"abc", purpose="user_data"),
        file_of(stack, "file", b"abcd"),
    ):
        assert other.status_code == 409
        assert other.json()["error"]["code"] == "idempotency_conflict"
    assert file_of(stack, "file", b"abc").json() == first.json()
    content = httpx.get(f"{stack.url}/files/{first.json()['id']}/content")
    assert content.content == b"abc"


def test_after_a_day_another_create_is_another_batch(stack: Stack) -> None:
    made = [file_of(stack, f"batch {n}", orjson.dumps(chat_line(f"r{n}"))).json() for n in range(2)]

    def create(file: Any, **more: Any) -> Any:
        body = {
            "input_file_id": file["id"], "endpoint": "/v1/chat/completions",
            "completion_window": "24h", **more,
        }  # fmt: skip
        return post(stack, "/v1/batches", "batch", json=body).json()

    first = create(made[0])
    forget(stack)
    other = create(made[1])
    forget(stack)
    third = create(made[0], metadata={"a": "b"})
    forget(stack)
    assert len({first["id"], other["id"], third["id"]}) == 3
    assert other["input_file_id"] == made[1]["id"]
    assert create(made[0])["id"] == first["id"]


def test_after_a_day_another_upload_is_another_one(stack: Stack) -> None:
    def create(size: int) -> Any:
        body = {"bytes": size, "filename": "a", "purpose": "batch", "mime_type": "text/plain"}
        return post(stack, "/v1/uploads", "upload", json=body).json()

    first = create(3)
    forget(stack)
    other = create(4)
    assert (other["bytes"], other["id"] == first["id"]) == (4, False)
    forget(stack)
    assert create(3)["id"] == first["id"]


def test_after_a_day_other_messages_are_no_longer_the_old_batch(stack: Stack) -> None:
    def create(text: str) -> httpx.Response:
        params = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
        body = {"requests": [{"custom_id": "a", "params": params}]}
        return post(stack, "/v1/messages/batches", "messages", json=body)

    first = create("one")
    assert first.status_code == 200
    forget(stack)
    other = create("two")
    assert other.status_code == 409
    assert other.json()["error"]["type"] == "conflict_error"
    forget(stack)
    assert create("one").json()["id"] == first.json()["id"]

    def ended() -> bool:
        path = f"/v1/messages/batches/{first.json()['id']}"
        return bool(httpx.get(stack.gateway.url + path).json()["processing_status"] == "ended")

    eventually(ended, 30, "the first one ends")
    results = httpx.get(f"{stack.gateway.url}/v1/messages/batches/{first.json()['id']}/results")
    assert text_of(results)
