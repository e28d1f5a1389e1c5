"""What a stream sends while its request has nothing to say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contract.openai.body import CHAT_URL
from contract.streaming import Piece
from gateway.online import answer as module
from gateway.online.answer import KEEP_ALIVE_COMMENT, StreamedAnswer
from gateway.online.pending import ClientGone, Waiter
from gateway.online.request import read
from gateway.redis.online import Push

BODY = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "x"}]}'


def test_a_stream_shows_that_it_lives_before_its_first_text_and_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.001)

    async def streamed() -> list[bytes]:
        waiter = Waiter(Push("list", "r1", None, b""), listens=True)
        sent: list[bytes] = []
        said: list[bool] = []

        async def send(message: Any) -> None:
            data: bytes = message.get("body", b"")
            sent.append(data)
            if data != KEEP_ALIVE_COMMENT:
                said.append(b"Hello" in data)
            elif said and said[-1]:
                waiter.end(ClientGone())  # a sign of life after the text: that is all
            else:
                waiter.pieces = [Piece("r1", 1, 0, 0, "Hello")]
                waiter.poke()

        stream = StreamedAnswer(read(CHAT_URL, BODY, 0), waiter, send, {})
        async with asyncio.timeout(20):
            assert await stream.run(60) is None
        return sent

    sent = asyncio.run(streamed())
    text_at = next(at for at, data in enumerate(sent) if b"Hello" in data)
    assert KEEP_ALIVE_COMMENT in sent[:text_at]
    assert KEEP_ALIVE_COMMENT in sent[text_at:]
