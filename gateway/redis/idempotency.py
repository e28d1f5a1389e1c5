"""POSTs that were here before, by caller, path and Idempotency-Key; the answer of the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import orjson

from contract.redis.reads import Reads
from gateway.redis.async_calls import AsyncCalls

#: A try whose gateway has not said for so long that it goes on has died with it.
LEASE_MS = 15_000
#: How long an answer is remembered: OpenAI's and others' promise is a day.
REMEMBER_MS = 25 * 3600 * 1000


class Answer(NamedTuple):
    """An answer as it is stored: status, headers of interest, body."""

    status: int
    headers: dict[str, str]
    body: bytes


class IdempotencyState(NamedTuple):
    """What is known of a try: `new` (it is its turn), `running` (another try is at it, for
    `wait_ms` at least), `other` (the key came with another content), `done` (with the `answer`,
    if it was stored and the content is the same)."""

    state: Literal["new", "running", "other", "done"]
    wait_ms: int = 0
    answer: Answer | None = None


class IdempotencyStore(AsyncCalls):
    """Tries, by their names."""

    async def begin(self, name: str, fingerprint: str, token: str) -> IdempotencyState:
        """Begin a try, or tell the content of one that has begun; '' is not known yet."""
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
        """Let the next try be the first: this one has had no answer, or one that may change."""
        await self._run("idempotent_end", name, token, "forget")

    async def finish(self, name: str, token: str, answer: Answer | None) -> None:
        """Remember that a try has had its answer, and the answer itself if it may be stored."""
        stored = (answer.status, orjson.dumps(answer.headers), answer.body) if answer else ()
        await self._run("idempotent_end", name, token, "done", REMEMBER_MS, *stored)


class Renewals(Reads):
    """Says of tries that they go on; from any thread."""

    def renew(self, jobs: Sequence[tuple[str, str]]) -> list[bool]:
        """Hold the names that tries have by their tokens, in one round trip; False of a name that
        another try has."""
        calls = [(*job, "renew", LEASE_MS) for job in jobs]
        return [*map(bool, self._client.run_scripts("idempotent_end", calls))]
