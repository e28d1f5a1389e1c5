"""Counts callers' usage in Redis: rates by key, tokens and bytes by tenant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import orjson

from contract.redis.objects import ENDED
from contract.redis.reads import Reads
from gateway.redis.async_calls import AsyncCalls, retry_on_disconnect
from gateway.redis.responses import BackgroundResponses

#: Milliseconds for which tokens or bytes may be counted before their batch, response or file is
#: created.
GRACE_MS = 60_000


class Take(NamedTuple):
    """Requests and tokens to take from a key's rates; a limit may be None.

    With 0 `requests` it is a correction, which is never refused; `tokens` may be negative.
    """

    key_id: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    requests: int
    tokens: int


class Taken(NamedTuple):
    """The answer to a Take.

    `wait_ms`: time until the Take would be allowed, -1 for never. `requests_full_ms` and
    `tokens_full_ms`: time until the rate is unused again.
    """

    allowed: bool
    requests_left: int
    requests_full_ms: int
    tokens_left: int
    tokens_full_ms: int
    wait_ms: int


class Rates(AsyncCalls):
    async def take(self, takes: Sequence[Take]) -> list[Taken]:
        """Apply several Takes in one round trip."""
        flat = ["" if part is None else part for part in chain.from_iterable(takes)]
        rows = await retry_on_disconnect(
            self._client, lambda: self._client.run_script("rate", *flat)
        )
        return [Taken(bool(row[0]), *row[1:]) for row in rows]


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused reservation; `held` counts the tokens of other batches, or bytes of files."""

    model: str
    held: int


class Budgets(Reads):
    """Counts tokens and bytes by tenant. Calls raise StoreUnavailable."""

    def reserve(
        self, tenant: str, batch_id: str, tokens: Mapping[str, int], limit: int | None
    ) -> Refused | None:
        """Reserve tokens by model, replacing the batch's earlier ones; None if they fit `limit`."""
        flat = chain.from_iterable((model, int(n)) for model, n in tokens.items())
        reply = self._run("reserve", tenant, batch_id, "" if limit is None else limit, *flat)
        return None if reply[0] else Refused(reply[1].decode(), int(reply[2]))

    def give_back(self, batch_id: str) -> bool:
        """Release the tokens that a batch has reserved; return whether it had any."""
        return bool(self._run("give_back", batch_id))

    def enqueued(self, tenant: str) -> dict[str, int]:
        """Return the reserved tokens of a tenant's batches, by model."""
        by_model = self._client.hgetall(f"warmq:gateway:enqueued:{tenant}")
        return {model.decode(): int(tokens) for model, tokens in by_model.items()}

    def give_back_of_ended(self, tenant: str) -> int:
        """Release tokens of ended or deleted batches and responses; return how many held some."""
        now, count = self.now_ms(), 0
        for page in self._pages(f"warmq:gateway:reserved:{tenant}"):
            older = [name for name, note in page if _is_older(orjson.loads(note), now)]
            responses = [name for name in older if name.startswith("resp_")]
            batches = [name for name in older if not name.startswith("resp_")]
            keys = [f"warmq:gateway:batch:{batch_id}" for batch_id in batches]
            ended = [_has_ended(document) for document in self._each("hget", keys, "document")]
            ended += BackgroundResponses.using(self).over(responses)
            for name, over in zip((*batches, *responses), ended, strict=True):
                if over:
                    count += self.give_back(name)
        return count

    def note_bytes(self, tenant: str, file_id: str, size: int, limit: int | None) -> Refused | None:
        """Count a file's bytes, replacing earlier ones (0: it was deleted); None if they fit.

        `tenant` may be '' for a file that is counted already.
        """
        limited = "" if limit is None else limit
        fits, held = self._run("note_bytes", tenant, file_id, size, limited)
        return None if fits else Refused("", int(held))

    def stored_bytes(self, tenant: str) -> int:
        return int(self._client.hget("warmq:gateway:stored", tenant) or 0)

    def forget_files_that_have_gone(self, tenant: str) -> int:
        """Remove files that no longer exist from a tenant's count; return their number."""
        now, count = self.now_ms(), 0
        for page in self._pages(f"warmq:gateway:stored:{tenant}"):
            keys = [_counted_key(name) for name, _ in page]
            owners = self._each("hget", keys, "owner")
            for (file_id, note), owner in zip(page, owners, strict=True):
                if owner is None and not 0 <= now - int(note.split()[1]) < GRACE_MS:
                    self.note_bytes(tenant, file_id, 0, None)
                    count += 1
        return count

    def _pages(self, key: str) -> Iterator[list[tuple[str, bytes]]]:
        cursor = -1
        while cursor:
            cursor, entries = self._client.hscan(key, max(0, cursor), count=250)
            yield [(name.decode(), value) for name, value in entries.items()]


def _counted_key(name: str) -> str:
    """Return the Redis key of the file or upload whose bytes are counted."""
    kind = "upload" if name.startswith("upload_") else "file"
    return f"warmq:gateway:{kind}:{name}"


def _is_older(note: dict[str, Any], now_ms: int) -> bool:
    """Return whether a reservation is older than GRACE_MS."""
    return not 0 <= now_ms - note["at"] < GRACE_MS  # below 0: Redis's clock has stepped back


def _has_ended(document: bytes | None) -> bool:
    return document is None or orjson.loads(document).get("status") in ENDED
