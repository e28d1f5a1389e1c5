"""A load client in a process of its own: connections that each send the next request at once.

    clients.py URL CONNECTIONS SECONDS MEAN_S [MODEL]

Each request says how long the simulated engine takes for it, drawn here, so that what comes on top
is known for each. Prints JSON: how many requests in how many seconds, the engine's seconds in all,
ms on top of each, statuses. What ends in the first and the last eighth of the time is not counted.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop

SIGMA = 0.5
PROMPT = "x" * 500


class Load:
    """What all connections of one run share."""

    def __init__(self, host: str, path: str, seconds: float, mean_s: float, model: str) -> None:
        self.host, self.path, self.mean_s, self.model = host, path, mean_s, model
        self.random = random.Random(11)
        now = time.monotonic()
        self.ends = now + seconds
        self.counts_from, self.counts_to = now + seconds / 8, now + seconds * 7 / 8
        self.added_ms: list[float] = []
        self.engine_s = 0.0
        self.statuses: Counter[int] = Counter()
        self.open = 0
        self.over = asyncio.Event()

    def draw(self) -> float:
        if not self.mean_s:
            return 0.0
        return self.random.lognormvariate(math.log(self.mean_s) - SIGMA**2 / 2, SIGMA)

    def request(self, engine_s: float) -> bytes:
        body = orjson.dumps({
            "model": self.model, "user": f"simulate:sleep={engine_s:.6f}",
            "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 64,
        })  # fmt: skip
        return (
            f"POST {self.path} HTTP/1.1\r\nhost: {self.host}\r\nauthorization: Bearer sk-x\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body

    def took(self, began: float, engine_s: float, status: int) -> None:
        now = time.monotonic()
        self.statuses[status] += 1
        if self.counts_from <= now <= self.counts_to:
            self.added_ms.append(1000 * (now - began - engine_s))
            self.engine_s += engine_s


class Connection(asyncio.Protocol):
    """One connection: the next request follows at once when the last one is answered."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._load.open += 1
        self._ask()

    def _ask(self) -> None:
        if time.monotonic() > self._load.ends:
            self._transport.close()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._engine_s = self._load.draw()
        request = self._load.request(self._engine_s)
        self._began = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._load.took(self._began, self._engine_s, self._parser.get_status_code())
        asyncio.get_running_loop().call_soon(self._ask)

    def connection_lost(self, _: object) -> None:
        self._load.open -= 1
        if not self._load.open:
            self._load.over.set()


async def main(url: str, connections: int, seconds: float, mean_s: float, model: str) -> None:
    """Run, and print what was seen."""
    parts = urlsplit(url)
    load = Load(parts.netloc, parts.path, seconds, mean_s, model)
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Connection(load), parts.hostname, parts.port)
    await load.over.wait()
    print(orjson.dumps({
        "count": len(load.added_ms), "seconds": load.counts_to - load.counts_from,
        "engine_s": load.engine_s, "added_ms": [round(ms, 3) for ms in load.added_ms],
        "statuses": {str(status): n for status, n in load.statuses.items()},
        "all": sum(load.statuses.values()),
    }).decode())  # fmt: skip


if __name__ == "__main__":
    address, count, length, mean, *named = sys.argv[1:]
    uvloop.run(main(address, int(count), float(length), float(mean), (named or ["small"])[0]))
