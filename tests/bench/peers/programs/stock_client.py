"""What a client of each queue does in part `queues`; run in that queue's environment.

`enqueue COUNT` sends requests of 0.5 KB one after another to the queue STOCK_QUEUE, which no worker
reads, and prints the seconds and the keys of their results; `collect COUNT` reads those keys from
its input and prints the seconds it took to read the results through the queue's own client; `idle
COUNT` sends one at a time to an idle worker and looks for its result's key. The last line printed
is JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis

#: As in load.py and latency.py.
PROMPT = "x" * 500
PAUSES_S = (0.03, 0.1)
LOOK_S = 0.0002
#: Sends a body; returns the key that its result will have in Redis.
Send = Callable[[dict[str, Any]], Awaitable[str]]
#: Takes such a key; returns the answer, as the queue's own client reads it.
Fetch = Callable[[str], Awaitable[dict[str, Any]]]


async def obey(url: str, send: Send, fetch: Fetch) -> None:
    """Do what the command line says."""
    what, count = sys.argv[1], int(sys.argv[2])
    client = redis.Redis.from_url(url)
    bodies = [{"prompt": f"{n:08d} {PROMPT}", "max_tokens": 64} for n in range(count)]
    if what == "enqueue":
        began = time.monotonic()
        keys = [await send(body) for body in bodies]
        print(json.dumps([time.monotonic() - began, keys]))
        return
    if what == "collect":
        keys = json.load(sys.stdin)
        began = time.monotonic()
        answers = [await fetch(key) for key in keys]
        print(json.dumps([time.monotonic() - began, sum(map(bool, answers))]))
        return
    times = []
    rng = random.Random(12)
    for body in bodies:
        await asyncio.sleep(rng.uniform(*PAUSES_S))
        began = time.monotonic()
        key = await send(body)
        while not client.exists(key):
            time.sleep(LOOK_S)  # noqa: ASYNC251 - nothing else is to run
        times.append(1000 * (time.monotonic() - began))
    print(json.dumps(times))
