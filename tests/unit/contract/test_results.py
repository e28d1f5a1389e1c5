"""Results: Celery's meta as stored, OpenAI's line as users read it."""

from __future__ import annotations

import orjson
import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from kit.commands.error_codes import error_codes
from kit.protocol.lessee import celery_message

from contract import results
from contract.errors import RequestFailed, RequestRejected
from contract.message import read_delivery
from contract.openai.body import prompt_beginning
from contract.results import failure_meta, outcome_of, read_meta, result_line, success_meta

BODY = {"object": "chat.completion", "choices": [], "usage": {"total_tokens": 5}}


def success() -> bytes:
    """Return a stored success of line 7 of batch b1."""
    ours = {"batch": "b1", "created": "5", "custom_id": "c7", "line": 7}
    delivery = read_delivery("w/1", celery_message("t0", warmq=ours))
    return success_meta(delivery, orjson.dumps(BODY), {"engine_s": 1.5, "attempts": 2})


def test_a_success_is_celerys_meta_with_one_field_of_ours() -> None:
    meta = orjson.loads(success())
    date = meta.pop("date_done")
    assert "T" in date
    assert meta == {
        "status": "SUCCESS", "result": BODY, "traceback": None, "children": [], "task_id": "t0",
        "warmq": {
            "batch": "b1", "custom_id": "c7", "line": 7, "error": None,
            "timing": {"engine_s": 1.5, "attempts": 2},
        },
    }  # fmt: skip


def decoded(raw: bytes) -> BaseException:
    """Return the exception that a stock client's backend makes of a meta."""
    backend = Celery("x", backend="cache+memory://", set_as_current=False).backend
    meta = backend.meta_from_decoded(orjson.loads(raw))
    assert isinstance(meta["result"], BaseException)
    return meta["result"]


def test_a_stock_client_gets_an_exception_with_the_text() -> None:
    error = decoded(failure_meta("t0", RequestRejected("field n: too big", field="n")))
    assert type(error).__name__ == "RequestRejected"
    assert str(error) == "field n: too big"
    revoked = decoded(failure_meta("t0", RequestFailed("why", code="cancelled"), revoked=True))
    assert isinstance(revoked, TaskRevokedError)
    assert str(revoked) == "why"


@pytest.mark.parametrize(
    ("raw", "outcome"),
    [
        (success(), "completed"),
        (failure_meta("t0", RequestFailed("x")), "failed"),
        (failure_meta("t0", RequestFailed("x", code="cancelled"), revoked=True), "cancelled"),
        (failure_meta("t0", RequestFailed("x", code="expired"), revoked=True), "expired"),
        (b'{"status":"FAILURE","result":null}', "failed"),
    ],
)
def test_the_outcome_is_the_counter_it_belongs_to(raw: bytes, outcome: str) -> None:
    assert outcome_of(orjson.loads(raw)) == outcome


def test_a_success_becomes_openais_output_line() -> None:
    line = result_line("t0", "c7", 7, success())
    assert not line.failed
    assert orjson.loads(line.json) == {
        "id": "batch_req_t0", "custom_id": "c7", "error": None,
        "response": {"status_code": 200, "request_id": "t0", "body": BODY},
        "warmq": {"line": 7, "timing": {"engine_s": 1.5, "attempts": 2}},
    }  # fmt: skip


def test_a_failure_becomes_an_error_line_with_code_line_and_field() -> None:
    raw = failure_meta("t0", RequestRejected("bad", field="body.n"), custom_id="c7", line=7)
    line = result_line("t0", "c7", 7, raw)
    assert line.failed
    out = orjson.loads(line.json)
    assert out["response"] is None
    assert out["error"] == {
        "line": 7, "code": "invalid_request", "message": "bad", "param": "body.n",
    }  # fmt: skip


def test_a_lost_result_becomes_an_error_line_that_says_so() -> None:
    line = result_line("t0", "c7", 7, None)
    error = orjson.loads(line.json)["error"]
    assert line.failed
    assert error["code"] == "result_expired"
    assert error["code"] in error_codes()


def test_a_result_that_stock_celery_wrote_is_shown_too() -> None:
    raw = b'{"status":"FAILURE","result":{"exc_type":"X","exc_message":["y"]},"task_id":"t0"}'
    error = orjson.loads(result_line("t0", "c7", 7, raw).json)["error"]
    assert error["code"] == "request_failed"
    assert "y" in error["message"]


def test_the_short_way_for_a_success_writes_the_line_that_the_long_way_writes() -> None:
    for custom_id in ("c7", 'a "quoted"\n😀 one'):
        short = results._plain_line("t0", success(), custom_id, 7)
        assert short is not None
        assert short == results._any_line("t0", custom_id, 7, success())


@pytest.mark.parametrize(
    "raw", [success(), failure_meta("t0", RequestFailed("it broke"), custom_id="c7", line=7)]
)
def test_a_result_names_its_own_line(raw: bytes) -> None:
    assert results.stored_line("t0", raw) == result_line("t0", "c7", 7, raw)


def test_a_result_that_names_no_line_has_none() -> None:
    assert results.stored_line("t0", b'{"status":"SUCCESS","result":{}}') is None


@pytest.mark.parametrize(
    "raw",
    [
        b"null",
        b'{"status":"SUCCESS","result":{"usage":{},"text":"\xff"},"warmq":{"timing":{}}}',
        b'{"status":"SUCCESS",\n"result":{\n"usage":{}},"warmq":{"timing":{}}}',
        b'{"status":"SUCCESS","result":"of another worker","warmq":null}',
        failure_meta("t0", RequestFailed("it broke")),
    ],
)
def test_anything_else_takes_the_long_way(raw: bytes) -> None:
    assert results._plain_line("t0", raw, "c7", 7) is None
    assert b"\n" not in result_line("t0", "c7", 7, raw).json


def test_a_result_has_the_beginning_of_its_prompt_and_no_output_line_has_it() -> None:
    delivery = read_delivery("w/1", celery_message("t0", warmq={"batch": "b1"}))
    raw = success_meta(delivery, b"{}", {"attempts": 1}, "Why is")
    assert read_meta(raw)["warmq"]["prompt"] == "Why is"
    assert b"Why is" not in result_line("r", "c", 1, raw).json
    assert read_meta(raw.replace(b'"Why is"', b"[1]"))["warmq"]["prompt"] is None


@pytest.mark.parametrize(("body", "beginning"), [
    ({"prompt": "x" * 200}, "x" * 100),
    ({"prompt": ["first", "second"]}, "second"),
    ({"prompt": [[1, 2]]}, ""),
    ({"input": "told"}, "told"),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "u"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}, {"text": "t"}]}]}, "t"),
    ({"messages": [{"role": "user", "content": None}]}, ""),
    ({}, ""),
])  # fmt: skip
def test_the_beginning_of_a_prompt_is_that_of_its_last_text(
    body: dict[str, object], beginning: str
) -> None:
    assert prompt_beginning(body) == beginning


def test_a_reused_answer_names_the_request_that_computed_it():
    # Given a success with what ENQUEUE writes when a known answer answers a line
    raw = (
        b'{"status":"SUCCESS","result":{"usage":{"total_tokens":3}},"traceback":null,'
        b'"children":[],"date_done":"2026-11-20T00:00:00+00:00","task_id":"new","warmq":'
        b'{"batch":"b","custom_id":"c","line":4,"error":null,"timing":{"engine_s":1.5},'
        b'"known":"0a","reused":true,"answered_by":"old"}}'
    )
    # Then both forms of the output line have it, with the timing of the computed request
    expected = {"line": 4, "timing": {"engine_s": 1.5}, "reused": True, "answered_by": "old"}
    for text in (raw, raw.replace(b'{"usage"', b'{\n"usage"')):
        line = orjson.loads(result_line("new", "c", 4, text).json)
        assert line["warmq"] == expected
        assert line["response"]["body"] == {"usage": {"total_tokens": 3}}
