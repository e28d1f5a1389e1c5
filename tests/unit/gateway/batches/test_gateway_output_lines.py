"""Lines of output and error files, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest
from kit.protocol.lessee import celery_message

from contract.errors import RequestFailed, RequestRejected, WarmqError
from contract.message import read_delivery
from contract.results import failure_meta, result_line, success_meta
from gateway.batches.api.output_lines import CHUNK_LINES, in_chunks, openai_line, usage_of
from gateway.batches.api.record import Usage


def failed(error: WarmqError, *, revoked: bool = False) -> dict[str, object]:
    """Return the error file's line for a request that ended with an error."""
    meta = failure_meta("r0", error, batch="b1", custom_id="c7", line=7, revoked=revoked)
    line = result_line("r0", "c7", 7, meta)
    assert line.failed
    return orjson.loads(openai_line(line))


def success(body: bytes) -> bytes:
    """Return the output file's line for an answer."""
    ours = {"batch": "b1", "created": "5", "custom_id": "c7", "line": 7}
    delivery = read_delivery("w/1", celery_message("r0", warmq=ours))
    line = result_line("r0", "c7", 7, success_meta(delivery, body, {"attempts": 1}))
    assert not line.failed
    return openai_line(line)


def test_an_answer_is_passed_on_as_it_was_written() -> None:
    body = b'{"object": "chat.completion",  "big": 12345678901234567890123, "x": 1.50}'
    line = success(body)
    assert b'"body":' + body in line
    read = orjson.loads(line)
    assert (read["id"], read["custom_id"], read["error"]) == ("batch_req_r0", "c7", None)
    assert read["response"] == {
        "status_code": 200, "request_id": "r0", "body": orjson.loads(body)
    }  # fmt: skip


def test_a_rejected_request_has_its_error_in_the_body_of_an_answer() -> None:
    line = failed(RequestRejected("line 7, field n: too big", field="n"))
    assert line["error"] is None
    assert line["response"] == {
        "status_code": 400,
        "request_id": "r0",
        "body": {
            "error": {
                "message": "line 7, field n: too big", "type": "invalid_request_error",
                "param": "n", "code": "invalid_request",
            }
        },
    }  # fmt: skip
    assert line["warmq"] == {"line": 7}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestRejected("no such model", code="model_not_found"), 404, "invalid_request_error"),
        (RequestRejected("x", code="a_code_of_another_server"), 400, "invalid_request_error"),
        (RequestFailed("the engine failed"), 500, "server_error"),
        (RequestFailed("it died", code="poison"), 500, "server_error"),
    ],
)
def test_the_status_says_whose_fault_it_was(error: WarmqError, status: int, kind: str) -> None:
    response = failed(error)["response"]
    assert isinstance(response, dict)
    assert response["status_code"] == status
    assert response["body"]["error"]["type"] == kind
    assert response["body"]["error"]["code"] == error.code


@pytest.mark.parametrize(
    ("code", "theirs"), [("expired", "batch_expired"), ("cancelled", "batch_cancelled")]
)
def test_a_request_that_never_had_an_answer_has_a_top_level_error(code: str, theirs: str) -> None:
    line = failed(RequestFailed("ours", code=code), revoked=True)
    assert line["response"] is None
    error = line["error"]
    assert isinstance(error, dict)
    assert error["code"] == theirs
    assert error["message"]


def test_a_lost_result_has_a_top_level_error() -> None:
    line = orjson.loads(openai_line(result_line("r0", "c7", 7, None)))
    assert line["response"] is None
    assert line["error"]["code"] == "result_expired"


def test_a_value_of_another_program_is_a_failed_request() -> None:
    line = orjson.loads(openai_line(result_line("r0", "c7", 7, b"\xff no json")))
    assert line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["code"] == "request_failed"


def test_a_follower_keeps_its_own_id_and_says_whose_error_it_is() -> None:
    meta = failure_meta("r0", RequestRejected("bad"), batch="b1", custom_id="c7", line=7)
    line = orjson.loads(openai_line(result_line("r1", "c9", 9, meta, "r0")))
    assert (line["id"], line["custom_id"]) == ("batch_req_r1", "c9")
    assert line["warmq"] == {"line": 9, "same_as": "c7"}


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}, Usage(5, 7)),
        (
            {
                "prompt_tokens": 5, "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            Usage(5, 7, 4, 2),
        ),
        ({"prompt_tokens": 5, "prompt_tokens_details": None}, Usage(5)),
        (
            {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}},
            Usage(3, 2, 1),
        ),
        ({"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 2}, Usage(3, 2, 2)),
        (None, Usage()),
        ("nonsense", Usage()),
    ],
)  # fmt: skip
def test_tokens_of_an_answer(usage: object, tokens: Usage) -> None:
    assert usage_of(success(orjson.dumps({"id": "x", "usage": usage}))) == tokens


def test_odd_details_of_another_server_leave_the_tokens_that_are_known() -> None:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3, "reasoning_tokens": "n/a"},
        "completion_tokens_details": {"reasoning_tokens": 2, "cached_tokens": 0.5},
    }
    found = usage_of(success(orjson.dumps({"id": "x", "usage": usage})))
    assert found == Usage(10, 5, cached=3, reasoning=2)


def test_an_answer_that_is_no_object_has_no_tokens() -> None:
    assert usage_of(success(b"[1,2]")) == Usage()


def test_an_answer_of_responses_has_the_fields_that_its_online_twin_has() -> None:
    text = {"type": "output_text", "text": '"object":"response"', "annotations": []}
    body = {
        "id": "resp_1",
        "object": "response",
        "output": [{"type": "message", "content": [text]}],
    }
    read = orjson.loads(success(orjson.dumps(body)))["response"]["body"]
    assert read["id"] == "resp_1"
    assert (read["error"], read["metadata"], read["instructions"]) == (None, {}, None)
    assert read["output"][0]["content"][0] == text | {"logprobs": []}


def test_a_chat_that_has_a_response_within_it_is_passed_on_as_it_was_written() -> None:
    body = b'{"object": "chat.completion",  "inner":{"object":"response"}}'
    assert b'"body":' + body in success(body)


def test_a_file_of_few_lines_among_many_is_sought_in_bounded_pieces() -> None:
    read = 0

    def lines() -> Iterator[bytes | None]:
        nonlocal read
        for number in range(2000):
            read += 1
            yield b"the one" if number == 1999 else None

    chunks = in_chunks(lines())
    assert next(chunks) == b""
    assert read == CHUNK_LINES
    assert b"".join(chunks) == b"the one\n"


def test_an_answer_of_another_request_counts_no_tokens() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 7}
    line = orjson.loads(success(orjson.dumps({"id": "x", "usage": usage})))
    for ours in ({"reused": True, "answered_by": "r"}, {"same_as": "c1"}):
        assert usage_of(orjson.dumps(line | {"warmq": line["warmq"] | ours})) == Usage()
