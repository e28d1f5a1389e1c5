"""What an online request is charged, however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from contract.errors import RequestFailed, RequestRejected, StoreFull
from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.results import failure_meta
from contract.streaming import Piece
from gateway.online.endpoint import reported_tokens, tokens_used
from gateway.online.pending import ClientGone, Waiter
from gateway.online.request import OnlineRequest, read
from gateway.redis.online import Push

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello, you there"}]}


def asked(url: str = CHAT_URL, **fields: Any) -> OnlineRequest:
    return read(url, orjson.dumps(CHAT | fields if url == CHAT_URL else fields), 0)


def charge(
    of: OnlineRequest, how: bytes | Exception | None, *pieces: Piece, goes_on: bool = False
) -> int:
    """Return what a request is charged that was queued and has ended so."""

    async def ended() -> int:
        waiter = Waiter(Push("list", "r", None, b""), listens=True)
        waiter.pushed = True
        for piece in pieces:
            waiter.receive(piece)
        if how is not None:
            waiter.end(how)
        return tokens_used(of, waiter, None, goes_on=goes_on)

    return asyncio.run(ended())


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"usage": {"total_tokens": 7}}', 7),
        (b'{"usage": {"input_tokens": 3, "output_tokens": 4}}', 7),
        (b'{"count": 9, "max_model_len": 100, "tokens": [1]}', 9),
        (b'{"input_tokens": 5}', 5),
        (b'{"usage": null}', None),
        (b'{"choices": []}', None),
    ],
)
def test_an_answer_says_what_it_has_used(body: bytes, tokens: int | None) -> None:
    assert reported_tokens(body) == tokens


def test_who_hangs_up_pays_the_prompt_and_what_was_written_within_what_was_asked() -> None:
    of = asked(max_tokens=20)
    hello = Piece("r", 1, 0, 0, "Hello, wörld")
    assert charge(of, ClientGone()) == of.prompt_tokens > 10
    assert charge(of, ClientGone(), hello) == of.prompt_tokens + 13
    twice = Piece("r", 2, 0, 0, "Hello")  # run again: the same text is not counted twice
    assert charge(of, ClientGone(), hello, twice) == of.prompt_tokens + 13
    assert charge(of, ClientGone(), hello, hello._replace(choice=1)) == of.prompt_tokens + 20
    assert (
        charge(asked(), ClientGone(), hello) == asked().prompt_tokens + 13
    )  # nothing is said of most


def test_of_what_nobody_can_hear_what_was_asked_for_is_kept() -> None:
    for of, goes_on in ((asked(max_tokens=20, n=2, logprobs=True), False), (
        asked(max_tokens=20, n=2), True,
    )):  # fmt: skip
        assert charge(of, ClientGone(), goes_on=goes_on) == of.tokens == of.prompt_tokens + 40


def test_what_was_not_run_costs_nothing() -> None:
    of = asked(max_tokens=20)
    assert tokens_used(of, None, None, goes_on=False) == 0
    assert charge(of, StoreFull("full")) == 0
    assert charge(of, failure_meta("r", RequestFailed("late", code="expired"))) == 0
    refused = failure_meta("r", RequestRejected("no"), timing={"engine_s": 1, "attempts": 1})
    assert charge(of, refused) == 0
    failed = failure_meta("r", RequestFailed("no"), timing={"engine_s": 1, "attempts": 1})
    assert charge(of, failed, Piece("r", 1, 0, 0, "abc")) == of.prompt_tokens + 3


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("one", 1), (["a", "b", "c"], 3), ([1, 2, 3], 1), ([[1, 2], [3]], 2), (["a"], 1)],
)
def test_each_prompt_may_be_answered_as_often_as_asked(prompt: Any, count: int) -> None:
    of = asked(COMPLETION_URL, model="m", prompt=prompt, max_tokens=10, n=2)
    assert of.tokens - of.prompt_tokens == count * 20
