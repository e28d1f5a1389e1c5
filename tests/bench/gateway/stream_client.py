"""A client in a process of its own that reads streamed chats, so many at once.

    stream_client.py URL KEY MODEL AT_ONCE REQUESTS TOKENS

Prints JSON: seconds from the first request to the last answer's end, completion tokens as the
server counts them, ms to the first text of each answer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field

import aiohttp
import orjson
import uvloop

DATA, DONE = b"data: ", b"data: [DONE]"


@dataclass
class Seen:
    """What all connections have seen."""

    tokens: int = 0
    first_ms: list[float] = field(default_factory=list)


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], seen: Seen
) -> None:
    """Read one answer to its end."""
    began, first = time.monotonic(), 0.0
    async with session.post(url, data=orjson.dumps(body)) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(DATA) or line.startswith(DONE):
                continue
            chunk = orjson.loads(line[len(DATA) :])
            if not first and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first = time.monotonic()
                seen.first_ms.append(1000 * (first - began))
            if chunk.get("usage"):
                seen.tokens += chunk["usage"]["completion_tokens"]


async def main(url: str, key: str, model: str, at_once: int, count: int, tokens: int) -> None:
    """Ask, and print what was seen."""
    seen = Seen()
    left = iter(range(count))
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connector = aiohttp.TCPConnector(limit=at_once)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def connection() -> None:
            for number in left:
                body = {
                    "model": model, "stream": True, "stream_options": {"include_usage": True},
                    "messages": [{"role": "user", "content": f"What is {number} + 3?"}],
                    "max_tokens": tokens, "ignore_eos": True, "seed": number,
                }  # fmt: skip
                await ask(session, url, body, seen)

        began = time.monotonic()
        await asyncio.gather(*(connection() for _ in range(at_once)))
        seconds = time.monotonic() - began
    found = {"seconds": seconds, "tokens": seen.tokens, "first_ms": seen.first_ms}
    print(orjson.dumps(found).decode())


if __name__ == "__main__":
    address, secret, name, *numbers = sys.argv[1:]
    uvloop.run(main(address, secret, name, *map(int, numbers)))
