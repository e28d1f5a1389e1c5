"""Background responses and their input items as JSON, held against OpenAI's schemas."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from kit.gateways.answer_schemas import validates
from openai.types.responses import Response

from contract.errors import RequestFailed, RequestRejected
from contract.message import Delivery
from contract.results import failure_meta, success_meta
from gateway.online.responses.objects import input_items, page_of, response_object
from gateway.online.responses.record import GRACE_S, ResponseRecord, decode, encode
from gateway.redis.responses import StoredResponse

ID = "resp_0123456789abcdef01234567"
RECORD = ResponseRecord(
    id=ID, tenant="t", created_at=1000, deadline=2000.0, model="m", queue="warmq.m", priority=6,
    shown={"instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 9},
)  # fmt: skip
PART = {"type": "output_text", "text": "Hi", "annotations": []}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
           "content": [PART]}  # fmt: skip
ANSWER: dict[str, Any] = {
    "id": "resp_other", "object": "response", "created_at": 1, "model": "m", "status": "completed",
    "output": [MESSAGE], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    "background": False, "instructions": None, "temperature": 0.5,
    "usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3,
              "output_tokens_details": {"reasoning_tokens": 0}},
}  # fmt: skip


def answered(**fields: Any) -> bytes:
    """Return a stored success."""
    message: dict[str, Any] = {}
    delivery = Delivery(
        "l", RECORD.request_id, "t", "", "", "", 0, None, None, None, None, False, {}, message
    )
    return success_meta(delivery, orjson.dumps(ANSWER | fields), {"queued": 1.0})


def shown(result: bytes = b"", *, now: float = 1500, running: bool = False, **of: Any) -> Any:
    """Return the JSON of a response; it must be as OpenAI's schema and its SDK have it."""
    given = {"pushed": True, "cancelled": False, "noted": False} | of
    stored = StoredResponse(ID, "t", encode(RECORD), result=result, **given)
    found = response_object(RECORD, stored, running=running, now=now)
    validates("Response", found)
    assert (found["id"], found["created_at"], found["background"]) == (ID, 1000, True)
    assert Response.model_validate(found).status == found["status"]
    return found


def test_a_record_is_read_as_it_was_written() -> None:
    assert decode(encode(RECORD)) == RECORD


@pytest.mark.parametrize(
    ("of", "status"),
    [
        ({"pushed": False}, "queued"),
        ({}, "queued"),
        ({"running": True}, "in_progress"),
        ({"cancelled": True}, "cancelled"),
        ({"result": answered(), "cancelled": True}, "cancelled"),
        ({"result": answered()}, "completed"),
        ({"result": answered(status="in_progress")}, "completed"),
        ({"result": answered(status="incomplete",
                             incomplete_details={"reason": "max_output_tokens"})}, "incomplete"),
        ({"now": 2000 + GRACE_S}, "queued"),
        ({"now": 2001 + GRACE_S}, "failed"),
    ],
)  # fmt: skip
def test_each_state_has_its_status(of: dict[str, Any], status: str) -> None:
    assert shown(**of)["status"] == status


def test_what_has_not_ended_shows_its_request() -> None:
    found = shown()
    assert (found["instructions"], found["metadata"]) == ("Be brief.", {"a": "b"})
    assert (found["model"], found["max_output_tokens"]) == ("m", 9)
    assert (found["output"], found["usage"], found["error"]) == ([], None, None)


def test_an_answer_comes_with_its_values_and_with_those_of_the_request_that_it_lacks() -> None:
    found = shown(answered())
    assert found["output"][0]["content"][0] == PART | {"logprobs": []}
    assert (found["temperature"], found["instructions"]) == (0.5, "Be brief.")
    assert found["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert found["completed_at"] > 1000
    assert "completed_at" not in shown(answered(status="incomplete"))


def failed(error: Exception, **options: Any) -> Any:
    return shown(failure_meta(RECORD.request_id, error, **options))  # type: ignore[arg-type]


def test_a_failure_has_openais_code_and_warmqs() -> None:
    found = failed(RequestFailed("the engine died each time", code="poison"))
    assert found["status"] == "failed"
    error = {"code": "server_error", "message": "the engine died each time", "type": "poison"}
    assert found["error"] == error


def test_a_rejected_request_names_its_field() -> None:
    found = failed(RequestRejected("too long", code="too_long", field="body.input"))
    assert found["error"] == {
        "code": "invalid_prompt", "message": "too long", "type": "too_long", "param": "input",
    }  # fmt: skip


def test_what_was_cancelled_in_the_queue_is_cancelled_and_what_expired_has_failed() -> None:
    for code, status in (("cancelled", "cancelled"), ("expired", "failed")):
        found = failed(RequestFailed("by an operator", code=code), revoked=True)
        assert found["status"] == status


@pytest.mark.parametrize("body", [b"[]", b'{"output": [3]}', b'{"output": 3}'])
def test_a_malformed_answer_of_another_program_is_a_failure(body: bytes) -> None:
    written = answered().replace(orjson.dumps(ANSWER), body)
    assert shown(written)["error"]["type"] == "request_failed"
    assert shown(b"nonsense")["status"] == "failed"


# -- input items ------------------------------------------------------------------------------


def items(content: Any) -> list[dict[str, Any]]:
    """Return the items of an input; their page must be as OpenAI's schema has it."""
    found = input_items(RECORD, content)
    page = page_of(found, after="", limit=100, oldest_first=True)
    validates("ResponseItemList", page)
    assert page is not None and page["data"] == found
    return found


def test_a_text_is_one_message_of_the_user() -> None:
    (item,) = items("Hello")
    assert (item["type"], item["role"], item["status"]) == ("message", "user", "completed")
    assert item["content"] == [{"type": "input_text", "text": "Hello"}]
    assert item["id"].startswith("msg_")


def test_each_item_of_a_conversation_has_an_id_and_its_content_in_parts() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    found = items([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "input_text", "text": "Look:"},
            {"type": "input_image", "image_url": "https://example.org/a.png"},
        ]},
        {"role": "assistant", "content": "I do."},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "7"},
        {"type": "message", "id": "msg_mine", "role": "user", "content": "And?"},
    ])  # fmt: skip
    assert len({item["id"] for item in found}) == 6
    assert found[1]["content"][1]["detail"] == "auto"
    part = {"type": "output_text", "text": "I do.", "annotations": [], "logprobs": []}
    assert found[2]["content"] == [part]
    assert found[3] == call | {"id": found[3]["id"], "status": "completed"}
    assert found[5]["id"] == "msg_mine"


def test_pages_go_both_ways_and_an_unknown_id_has_none() -> None:
    found = items([{"role": "user", "content": str(n)} for n in range(5)])
    ids = [item["id"] for item in found]

    def page(after: str = "", *, oldest_first: bool = False) -> Any:
        return page_of(found, after=after, limit=2, oldest_first=oldest_first)

    first = page()
    assert ([item["id"] for item in first["data"]], first["has_more"]) == (ids[:2:-1], True)
    last = page(ids[1])
    assert ([item["id"] for item in last["data"]], last["has_more"]) == (ids[:1], False)
    assert page(oldest_first=True)["last_id"] == ids[1]
    empty = page(ids[0])
    assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], "", False)
    validates("ResponseItemList", empty)
    assert page("msg_none") is None


@pytest.mark.parametrize(
    "entry", [{"type": ["list"]}, {"type": {}}, {"id": 3, "role": []}, {"content": [3, None]}, {}]
)
def test_no_entry_is_a_fault(entry: dict[str, Any]) -> None:
    (item,) = input_items(RECORD, [entry])
    assert isinstance(item["id"], str)
