"""What a caller may use: rates of online requests, tokens of batches, bytes of files; and how it is
told of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from contract.redis.records import Records
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.redis.async_calls import CallCombiner
from gateway.redis.limits import Budgets, Rates, Take, Taken

#: Bytes of JSON for a token of a prompt: about 4 in English, fewer in other languages. An estimate
#: need not be right: it is what a batch holds of a budget while it is there.
BYTES_PER_TOKEN = 4
#: Calls of a key that write (files, parts, batches and the like), a minute. Measured: a client that
#: sends 2,862 tiny parts of an upload in 20 s, another that creates 1,500 batches in 6 s.
WRITES_PER_MINUTE = 6000
#: Refusals of a key that are remembered for 25 hours each, because the call had an Idempotency-Key:
#: at 0.7 kB each that is 63 MB at most, from a client that never stops.
REFUSED_PER_MINUTE = 60
_WRITES: Any = {"requests_per_minute": WRITES_PER_MINUTE, "tokens_per_minute": None}
#: Redis is asked again for its maxmemory after so long.
_ASK_S = 60.0


def estimated_tokens(size: int) -> int:
    """Return about how many tokens the prompts of a file (or body) of so many bytes have."""
    return -(-size // BYTES_PER_TOKEN)


@dataclass(slots=True)
class Allowance:
    """What an online request was allowed. Its `headers` go on the answer; `limits` are those that
    count its `tokens`."""

    headers: Mapping[str, str]
    limits: Limits | None = None
    caller: Caller | None = None
    tokens: int = 0

    def settle(self, tokens: int) -> None:
        """Say what the request has used, of prompt and answer; 0 if it was not run.

        It returns at once; a correction that Redis does not take is lost, which a minute heals.
        """
        taken, self.tokens = self.tokens, tokens
        if self.limits is not None and self.caller is not None and tokens != taken:
            self.limits.correct(self.caller, tokens - taken)


_FREE = Allowance({})


class Limits:
    """Limits of a gateway's callers. All but the online ones are sync, for handlers in threads."""

    def __init__(self, rates: Rates, budgets: Budgets) -> None:
        self._rates = CallCombiner(rates.take)
        self._budgets = budgets
        self._most_records, self._most_asked_at = 0, float("-inf")

    # -- online requests ------------------------------------------------------------

    async def check_online(self, caller: Caller, tokens: int) -> Allowance:
        """Take a request, and its estimated tokens of prompt and answer, of the key's rates.

        Raises:
            LimitReached: 429.
            StoreUnavailable: Redis does not answer.
        """
        requests_limit, tokens_limit = caller.requests_per_minute, caller.tokens_per_minute
        if requests_limit is None and tokens_limit is None:
            return _FREE
        taken = await self._rates.put(
            Take(caller.key_id, requests_limit, tokens_limit, 1, tokens if tokens_limit else 0)
        )
        headers = rate_headers(caller, taken)
        if taken.allowed:
            return Allowance(headers, self if tokens_limit else None, caller, tokens)
        raise too_fast(caller, tokens, taken, headers)

    def correct(self, caller: Caller, tokens: int) -> None:
        """Take so many more tokens of a key's rate, or give back (negative), without waiting."""
        limit = caller.tokens_per_minute
        self._rates.put(Take(caller.key_id, caller.requests_per_minute, limit, 0, tokens))

    # -- writes -----------------------------------------------------------------------

    async def check_write(self, caller: Caller) -> None:
        """Take a call that writes of its key's rate.

        Raises:
            LimitReached: 429.
            StoreUnavailable: Redis does not answer.
        """
        taken = await self._rates.put(Take(f"{_who(caller)}:writes", WRITES_PER_MINUTE, None, 1, 0))
        if not taken.allowed:
            headers = rate_headers(replace(caller, **_WRITES), taken)
            raise writes_too_fast(WRITES_PER_MINUTE, "calls that write", taken.wait_ms, headers)

    async def check_refusals(self, caller: Caller) -> None:
        """Raise LimitReached (429) after too many refusals that are remembered."""
        taken = await self._rates.put(
            Take(f"{_who(caller)}:refused", None, REFUSED_PER_MINUTE, 1, 0)
        )
        if not taken.allowed:
            told = "calls with an Idempotency-Key that are refused"
            raise writes_too_fast(REFUSED_PER_MINUTE, told, taken.wait_ms, {})

    def note_refusal(self, caller: Caller) -> None:
        """Count a refusal that is remembered, without waiting."""
        self._rates.put(Take(f"{_who(caller)}:refused", None, REFUSED_PER_MINUTE, 0, 1))

    # -- batches --------------------------------------------------------------------

    def reserve(self, caller: Caller, batch_id: str, tokens: Mapping[str, int]) -> None:
        """Hold tokens of the tenant's budget for a batch, by model ('' before they are known).

        Called again for the same batch it holds these in place of the earlier ones: a retry holds
        nothing twice. Whoever ends the batch gives back.

        Raises:
            ApiError: 429 insufficient_quota; nothing is held that was not before.
        """
        limit = caller.enqueued_tokens
        refused = self._budgets.reserve(caller.tenant, batch_id, tokens, limit)
        if refused is not None and self._budgets.give_back_of_ended(caller.tenant):
            refused = self._budgets.reserve(caller.tenant, batch_id, tokens, limit)
        if refused is not None and limit is not None:
            asked, left = tokens[refused.model], max(0, limit - refused.held)
            of = f" of model {refused.model}" if refused.model else ""
            raise _over_budget(
                f"Enqueued token limit reached: the batch asks for about {asked} tokens{of}, and "
                f"{left} of {limit} are left; they come back as batches end, or are cancelled"
            )

    def give_back(self, batch_id: str) -> None:
        """End what a batch holds: at its end, when it was cancelled, has expired or failed."""
        self._budgets.give_back(batch_id)

    # -- files ------------------------------------------------------------------------

    def check_bytes(self, caller: Caller, size: int, body: int | None = None) -> None:
        """Raise ApiError (429) if a file of so many bytes would not fit, before it is read.

        It counts nothing: `note_bytes` decides. `body` is what the request has: all that is known
        for sure, and named in the error.
        """
        limit = caller.file_bytes
        if limit is None:
            return
        held = self._stored(caller.tenant, limit - size)
        if held + size > limit:
            asked = f"the file has {size} bytes"
            if body is not None:
                asked = f"the request's body has {body} bytes"
            raise _too_many_bytes(asked, held, limit)

    def check_stored(self, caller: Caller) -> None:
        """Raise ApiError (429) if the tenant's files are over its limit already.

        Answers are always kept, so output files can be what is too much. What makes more of them
        is refused until files were deleted.
        """
        limit = caller.file_bytes
        if limit is not None and (held := self._stored(caller.tenant, limit)) > limit:
            raise _over_budget(
                f"File storage limit reached: files have {held} bytes, output files included, and "
                f"{limit} are allowed; delete files you do not need, or wait until they expire"
            )

    def _stored(self, tenant: str, most: int) -> int:
        """Return the bytes of a tenant's files; if they are more, without those that have gone."""
        held = self._budgets.stored_bytes(tenant)
        if held > most and self._budgets.forget_files_that_have_gone(tenant):
            held = self._budgets.stored_bytes(tenant)
        return held

    def count_bytes(self, tenant: str, file_id: str, size: int) -> None:
        """Count a file's bytes whether they fit or not: answers are never lost to a limit."""
        self._budgets.note_bytes(tenant, file_id, size, None)

    def note_bytes(self, caller: Caller, file_id: str, size: int) -> None:
        """Count a file's bytes; repeated for the same file it counts them once.

        Raises:
            ApiError: as check_bytes; the file is not counted then, and must not be kept.
        """
        limit = caller.file_bytes
        refused = self._budgets.note_bytes(caller.tenant, file_id, size, limit)
        if refused is not None and self._budgets.forget_files_that_have_gone(caller.tenant):
            refused = self._budgets.note_bytes(caller.tenant, file_id, size, limit)
        if refused is not None and limit is not None:
            raise _too_many_bytes(f"the file has {size} bytes", refused.held, limit)

    # -- records ----------------------------------------------------------------------

    def check_records(self, caller: Caller) -> None:
        """Raise ApiError (429) if a tenant's records in Redis take as much as they may.

        Those of files, uploads and batches are counted together, metadata and all, whatever the
        key's limits: one tenant must not fill the Redis that all share.
        """
        records, tenant = Records.using(self._budgets), caller.tenant
        most = self._most_bytes(records)
        held = records.bytes_of(tenant)
        if held >= most and records.forget_gone(tenant):
            held = records.bytes_of(tenant)
        if held < most:
            return
        raise _over_budget(
            f"Record limit reached: the records of your files, uploads and batches take {held} "
            f"bytes, and {most} are allowed, metadata included; delete files you do not need "
            "(DELETE /v1/files/ID), or wait: the record of a batch goes 30 days after its end, of "
            "an upload a day after. The operator can delete records sooner"
        )

    def _most_bytes(self, records: Records) -> int:
        if time.monotonic() - self._most_asked_at >= _ASK_S:
            self._most_records = records.most_bytes()
            self._most_asked_at = time.monotonic()
        return self._most_records

    def forget_bytes(self, tenant: str, file_id: str) -> None:
        """Count a file's bytes no more; the tenant may be '' where it is not known."""
        self._budgets.note_bytes(tenant, file_id, 0, None)


def _who(caller: Caller) -> str:
    return caller.key_id or caller.tenant


def check_model(caller: Caller, model: str) -> None:
    """Raise ApiError (403) if the caller's key does not allow a model."""
    if not caller.may_use(model):
        allowed = ", ".join(sorted(caller.models or ()))
        raise ApiError(
            403, f"this key may not use the model {model[:200]!r}; it may use {allowed}",
            code="model_not_allowed", param="model",
        )  # fmt: skip


def _too_many_bytes(asked: str, held: int, limit: int) -> ApiError:
    return _over_budget(
        f"File storage limit reached: {asked}, and {max(0, limit - held)} of "
        f"{limit} are left; they come back as files are deleted or expire"
    )


def _over_budget(message: str) -> ApiError:
    return ApiError(429, message, code="insufficient_quota", type="insufficient_quota", retry=False)


class LimitReached(ApiError):
    """429 of a rate, with its headers: the SDKs wait for `retry-after` and try again."""

    def __init__(self, message: str, told: Mapping[str, str], **more: Any) -> None:
        super().__init__(429, message, code="rate_limit_exceeded", **more)
        self._told = told

    @property
    def headers(self) -> dict[str, str]:
        """Headers that say when to try again, and what is left."""
        return {**self._told, **super().headers}


def go_duration(ms: int) -> str:
    """Return a duration as Go writes it, which OpenAI's headers do: 12ms, 1.5s, 6m0s."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s" if minutes else (
        f"{seconds}s"
    )  # fmt: skip


def rate_headers(caller: Caller, taken: Taken) -> dict[str, str]:
    """Return the `x-ratelimit-*` headers of an answer, for what is limited."""
    found = {}
    for name, limit, left, full_ms in (
        ("requests", caller.requests_per_minute, taken.requests_left, taken.requests_full_ms),
        ("tokens", caller.tokens_per_minute, taken.tokens_left, taken.tokens_full_ms),
    ):
        if limit is not None:
            found[f"x-ratelimit-limit-{name}"] = str(limit)
            found[f"x-ratelimit-remaining-{name}"] = str(left)
            found[f"x-ratelimit-reset-{name}"] = go_duration(full_ms)
    return found


def too_fast(caller: Caller, tokens: int, taken: Taken, headers: Mapping[str, str]) -> LimitReached:
    """Return the refusal of a request: what it asked, what is left, when to try again."""
    if taken.wait_ms < 0:
        return LimitReached(
            f"Request too large: it asks for about {tokens} tokens, and the key's limit is "
            f"{caller.tokens_per_minute} a minute; send a shorter prompt or a smaller max_tokens",
            headers, retry=False, type="tokens",
        )  # fmt: skip
    parts = []
    if caller.requests_per_minute is not None:
        parts.append(f"{taken.requests_left} of {caller.requests_per_minute} requests")
    if caller.tokens_per_minute is not None:
        parts.append(
            f"{taken.tokens_left} of {caller.tokens_per_minute} tokens (asked: about {tokens})"
        )
    wait = go_duration(taken.wait_ms)
    return LimitReached(
        f"Rate limit reached: left of the key's minute are {' and '.join(parts)}; try again in "
        f"{wait}",
        {**headers, "retry-after-ms": str(taken.wait_ms)},
        after_s=taken.wait_ms / 1000 + 0.5,  # rounded up: at that time it is there
    )


def writes_too_fast(
    limit: int, what: str, wait_ms: int, headers: Mapping[str, str]
) -> LimitReached:
    """Return the refusal of a call that writes: the key's limit, and when to try again."""
    return LimitReached(
        f"Rate limit reached: a key may make {limit} {what} a minute; try again in "
        f"{go_duration(wait_ms)}",
        {**headers, "retry-after-ms": str(wait_ms)},
        after_s=wait_ms / 1000 + 0.5,
    )
