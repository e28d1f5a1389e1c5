"""Connections of gateways to Redis that are reset at random moments, while they connect, too."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Self

from kit.redis_servers.proxy import Fault, Proxy

#: What is drawn: every connection is reset where it stands; the next script is executed, its reply
#: lost; connections are reset after some bytes, most of them of the reply to HELLO.
KINDS = ("all", "reply", "connecting")
#: Between two resets, in seconds: the longest are longer than a lease.
LONGEST_S = 8.0
#: For how long connections are reset at their beginning, and after how many bytes at most.
CONNECTING_S, CONNECTING_BYTES = 0.4, 400


class Resets:
    """Draws resets by a seed for as long as it is entered, in a thread of its own."""

    def __init__(self, proxy: Proxy, seed: int) -> None:
        self.done: Counter[str] = Counter()
        #: When connections were reset, in ms since 1970: from the moment it was asked for on.
        self.at: list[float] = []
        self._proxy = proxy
        self._random = random.Random(f"{seed} resets")
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resets", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._enough.set()
        self._thread.join(20)

    def _run(self) -> None:
        # Mostly one soon after the other: a moment in which it matters is short.
        while not self._enough.wait(LONGEST_S * self._random.random() ** 3):
            kind = self._random.choice(KINDS)
            self.done[kind] += 1
            self._note()
            getattr(self, f"_{kind}")()
            self._note()

    def _note(self) -> None:
        self.at.append(time.time() * 1000)

    def _all(self) -> None:
        self._proxy.reset()

    def _reply(self) -> None:
        self._proxy.drop_reply(b"EVALSHA")
        self._proxy.dropped.wait(LONGEST_S)
        self._proxy.forget_marks()

    def _connecting(self) -> None:
        until = time.monotonic() + self._random.uniform(0.05, CONNECTING_S)
        while (left := until - time.monotonic()) > 0:
            self._proxy.fault = Fault(truncate_after=self._random.randint(0, CONNECTING_BYTES))
            self._proxy.reset()
            self._note()
            self._enough.wait(min(left, 0.02))
        self._proxy.fault = Fault()
