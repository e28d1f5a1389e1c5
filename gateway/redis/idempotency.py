"""Stores tries of POSTs with an Idempotency-Key, and the answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import orjson

from contract.redis.reads import Reads
from gateway.redis.async_calls import AsyncCalls

#: Milliseconds without renewal after which a try counts as dead, with its gateway.
LEASE_MS = 15_000
#: Milliseconds for which an answer is stored; OpenAI promises a day.
REMEMBER_MS = 25 * 3600 * 1000


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class IdempotencyState(NamedTuple):
    """The state of a try.

    `new`: this try runs. `running`: another try runs, whose lease lasts `wait_ms`. `other`: the key
    came with other content. `done`: another try has ended, with the `answer` if it was stored.
    """

    state: Literal["new", "running", "other", "done"]
    wait_ms: int = 0
    answer: Answer | None = None


class IdempotencyStore(AsyncCalls):
    """Stores tries by name, which is a digest of caller, path and key."""

    async def begin(self, name: str, fingerprint: str, token: str) -> IdempotencyState:
        """Begin a try, or set a begun try's fingerprint ('' if not known yet)."""
        state, *rest = await self._run(
            "idempotent_begin", name, fingerprint, token, LEASE_MS, REMEMBER_MS
        )
        if state == b"running":
            return IdempotencyState("running", int(rest[0]))
        if state == b"done" and rest:
            return IdempotencyState(
                "done", answer=Answer(int(rest[0]), orjson.loads(rest[1]), rest[2])
            )
        return IdempotencyState(state.decode())

    async def forget(self, name: str, token: str) -> None:
        """Forget a try that got no answer, or an answer that a retry may change."""
        await self._run("idempotent_end", name, token, "forget")

    async def finish(self, name: str, token: str, answer: Answer | None) -> None:
        """Note that a try is done, and store its answer if there is one."""
        stored = (answer.status, orjson.dumps(answer.headers), answer.body) if answer else ()
        await self._run("idempotent_end", name, token, "done", REMEMBER_MS, *stored)


class Renewals(Reads):
    """Renews the leases of tries, from any thread."""

    def renew(self, tries: Sequence[tuple[str, str]]) -> list[bool]:
        """Renew (name, token) tries in one round trip; False if another try has the name."""
        calls = [(*each, "renew", LEASE_MS) for each in tries]
        return [*map(bool, self._client.run_scripts("idempotent_end", calls))]
