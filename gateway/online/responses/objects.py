"""Makes the JSON of background responses and of their input items, as OpenAI's API shows them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import orjson

from contract.errors import RequestRejected, WarmqError
from contract.results import body_of, error_of, outcome_of, read_meta
from gateway.online.events import MALFORMED_ANSWER, complete_response
from gateway.online.responses.record import ResponseRecord, Status, is_lost
from gateway.redis.responses import StoredResponse

_LOST = "no worker has run the request in time, so it expired; send it again"
_MALFORMED = "another program wrote the answer of this request, and it is malformed"
#: Statuses that an engine's answer may have; any other counts as completed.
_OF_ANSWERS: dict[object, Status] = {"incomplete": "incomplete", "failed": "failed"}
#: Prefixes of the ids of input items that came without an id, by type.
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco",
             "reasoning": "rs"}  # fmt: skip
#: Types of items that always have a status in OpenAI's API.
_WITH_STATUS = frozenset(("message", "function_call", "function_call_output"))


def response_object(
    record: ResponseRecord, stored: StoredResponse, *, running: bool, now: float
) -> dict[str, Any]:
    """Return a response; `running`: a worker runs its request now."""
    if stored.cancelled:
        return _object(record, "cancelled")
    if stored.result:
        return _with_result(record, stored.result)
    if is_lost(stored, record, now):
        return _failed(record, "server_error", _LOST, "expired")
    return _object(record, "in_progress" if running else "queued")


def new_object(record: ResponseRecord) -> dict[str, Any]:
    """Return a response that was just created."""
    return _object(record, "queued")


def _object(
    record: ResponseRecord, status: Status, fields: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a response with all of OpenAI's fields; `fields` replace those of the request."""
    own = {
        "id": record.id, "object": "response", "created_at": record.created_at, "status": status,
        "background": True,
    }  # fmt: skip
    shown = {
        "model": record.model, "output": [], "parallel_tool_calls": True,
        "previous_response_id": None, "tool_choice": "auto", "tools": [], "usage": None,
    } | record.shown  # fmt: skip
    return own | complete_response(shown | dict(fields or {}) | own)


def _with_result(record: ResponseRecord, result: bytes) -> dict[str, Any]:
    body, meta = body_of(result), read_meta(result)
    if body is None:
        return _without_answer(record, meta, error_of(result))
    try:
        answer = orjson.loads(body)
        given = {
            name: value for name, value in answer.items()
            if value is not None or name not in record.shown
        }  # fmt: skip
        status = _OF_ANSWERS.get(answer.get("status"), "completed")
        ended = {"completed_at": _ended_at(meta)} if status == "completed" else {}
        return _object(record, status, given | ended)
    except MALFORMED_ANSWER:
        return _failed(record, "server_error", _MALFORMED, "request_failed")


def _without_answer(
    record: ResponseRecord, meta: dict[str, Any], error: WarmqError
) -> dict[str, Any]:
    if outcome_of(meta) == "cancelled":
        return _object(record, "cancelled")
    if not isinstance(error, RequestRejected):
        return _failed(record, "server_error", error.message, error.code)
    param = {"param": error.field.removeprefix("body.")} if error.field else {}
    return _failed(record, "invalid_prompt", error.message, error.code, **param)


def _failed(
    record: ResponseRecord, code: str, message: str, kind: str, **param: str
) -> dict[str, Any]:
    """Return a failed response; `code` is one of OpenAI's, `kind` is warmq's."""
    error = {"code": code, "message": message, "type": kind} | param
    return _object(record, "failed", {"error": error})


def _ended_at(meta: Mapping[str, Any]) -> int | None:
    try:
        return int(dt.datetime.fromisoformat(meta["date_done"]).timestamp())
    except MALFORMED_ANSWER:
        return None


def input_items(record: ResponseRecord, content: Any) -> list[dict[str, Any]]:
    """Return the items of a request's `input` in its order; each has an id."""
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    return [_item(record.request_id, n, entry) for n, entry in enumerate(content)]


def _item(request_id: str, number: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    item = dict(entry)
    kind = str(item.setdefault("type", "message"))
    if not isinstance(item.get("id"), str):
        item["id"] = f"{_PREFIXES.get(kind, 'item')}_{request_id}_{number}"
    if kind == "message":
        item["content"] = _parts(item.get("role"), item.get("content"))
    if kind in _WITH_STATUS and item.get("status") is None:
        item["status"] = "completed"
    return item


def _parts(role: object, content: Any) -> list[Any]:
    """Return a message's content as a list of parts."""
    text: dict[str, Any] = {"type": "input_text"}
    if role == "assistant":
        text = {"type": "output_text", "annotations": [], "logprobs": []}
    if not isinstance(content, list):
        return [text | {"text": content or ""}]
    return [
        _part(text, part) if isinstance(part, dict) else text | {"text": part} for part in content
    ]


def _part(text: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") in (text["type"], None):
        return text | part
    return {"detail": "auto"} | part if part.get("type") == "input_image" else part


def page_of(
    items: list[dict[str, Any]], *, after: str, limit: int, oldest_first: bool
) -> dict[str, Any] | None:
    """Return a page of items after the id `after` ('': from the first); None if it is unknown."""
    ordered = items if oldest_first else items[::-1]
    if after:
        found = next((n for n, item in enumerate(ordered) if item["id"] == after), None)
        if found is None:
            return None
        ordered = ordered[found + 1 :]
    data = ordered[:limit]
    return {
        "object": "list", "data": data, "has_more": len(ordered) > limit,
        # OpenAI's schema has texts here, so an empty page has no null.
        "first_id": data[0]["id"] if data else "", "last_id": data[-1]["id"] if data else "",
    }  # fmt: skip
