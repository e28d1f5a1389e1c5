"""The body of a background response: what is taken off, its priority, and what is refused."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from contract.errors import RequestRejected
from contract.openai.body import CHAT_URL, RESPONSES_URL
from gateway.http.errors import ApiError
from gateway.online.request import OnlineRequest, read


def asked(highest_priority: int = 0, **fields: Any) -> OnlineRequest:
    body = {"model": "m", "input": "Hello"} | fields
    return read(RESPONSES_URL, orjson.dumps(body), highest_priority)


@pytest.mark.parametrize("store", [{}, {"store": True}, {"store": None}])
def test_the_engine_gets_neither_background_nor_store(store: dict[str, Any]) -> None:
    found = asked(background=True, **store)
    assert found.background
    assert orjson.loads(found.body) == {"model": "m", "input": "Hello"}


@pytest.mark.parametrize("fields", [{}, {"background": False}, {"background": None}])
def test_every_other_response_is_an_online_request(fields: dict[str, Any]) -> None:
    found = asked(**fields)
    assert (found.background, found.priority) == (False, 0)


@pytest.mark.parametrize(
    ("fields", "priority"),
    [({}, 6), ({"service_tier": "flex"}, 3), ({"service_tier": "auto"}, 6), ({"priority": 1}, 1),
     ({"priority": 9, "service_tier": "flex"}, 9)],
)  # fmt: skip
def test_it_waits_like_a_batch_unless_it_is_flex_or_names_a_priority(
    fields: dict[str, Any], priority: int
) -> None:
    assert asked(background=True, **fields).priority == priority
    assert asked(7, background=True, **fields).priority == max(7, priority)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"background": "yes"}, "background"), ({"background": 1}, "background"),
     ({"background": True, "stream": True}, "stream"),
     ({"background": True, "store": False}, "store"),
     ({"background": True, "store": "no"}, "store")],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("fields", [{"store": True}, {"previous_response_id": "resp_1"}])
def test_nothing_else_is_kept(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected):
        asked(**fields)


def test_only_responses_have_a_background() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "background": True}
    with pytest.raises(RequestRejected) as caught:
        read(CHAT_URL, orjson.dumps(body), 0)
    assert caught.value.code == "unknown_field"
