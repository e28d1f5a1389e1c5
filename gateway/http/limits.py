"""Checks callers' limits: rates of keys, tokens of batches, bytes of files and records."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from contract.redis.records import Records
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.redis.async_calls import CallCombiner
from gateway.redis.limits import Budgets, Rates, Take, Taken

#: Estimated bytes of JSON for a token of a prompt: about 4 in English, fewer in other languages. A
#: batch reserves the estimated tokens only until it ends.
BYTES_PER_TOKEN = 4
#: Most writes of a key in a minute: files, upload parts, batches and so on. Measured: one client
#: sends 2,862 tiny upload parts in 20 s, another one creates 1,500 batches in 6 s.
WRITES_PER_MINUTE = 6000
#: Most refused calls of a key with an Idempotency-Key in a minute. Each refusal is stored for 25
#: hours and takes 0.7 kB: 63 MB at most, from a client that never stops.
REFUSED_PER_MINUTE = 60
#: Seconds for which Redis's maxmemory is cached.
_MAX_MEMORY_LIFE_S = 60.0


def estimated_tokens(size: int) -> int:
    """Return the estimated tokens of the prompts in a file or body of `size` bytes."""
    return -(-size // BYTES_PER_TOKEN)


class Limits:
    """Checks callers' limits. Only the calls about rates may run in the event loop."""

    def __init__(self, rates: Rates, budgets: Budgets) -> None:
        self._rates = CallCombiner(rates.take)
        self._budgets = budgets
        self._max_records, self._max_records_at = 0, float("-inf")

    async def check_online(self, caller: Caller, tokens: int) -> dict[str, str]:
        """Count a request and its tokens against the key's rates; return headers about them.

        Raises ApiError (429), or StoreUnavailable.
        """
        request_limit, token_limit = caller.requests_per_minute, caller.tokens_per_minute
        if request_limit is None and token_limit is None:
            return {}
        taken = await self._rates.put(
            Take(caller.key_id, request_limit, token_limit, 1, tokens if token_limit else 0)
        )
        headers = _rate_headers(request_limit, token_limit, taken)
        if taken.allowed:
            return headers
        if taken.wait_ms < 0:
            raise _rate_error(
                f"Request too large: it asks for about {tokens} tokens, and the key's limit is "
                f"{token_limit} a minute; send a shorter prompt or a smaller max_tokens",
                headers, retry=False, type="tokens",
            )  # fmt: skip
        left = []
        if request_limit is not None:
            left.append(f"{taken.requests_left} of {request_limit} requests")
        if token_limit is not None:
            left.append(f"{taken.tokens_left} of {token_limit} tokens (asked: about {tokens})")
        raise _wait_error(f"left in the key's minute: {' and '.join(left)}", taken.wait_ms, headers)

    def correct(self, caller: Caller, tokens: int) -> None:
        """Count `tokens` more against a key's rate, or fewer if negative, without waiting.

        If Redis does not accept a correction, it is lost; the rate is right again after a minute.
        """
        if tokens:
            request_limit, token_limit = caller.requests_per_minute, caller.tokens_per_minute
            self._rates.put(Take(caller.key_id, request_limit, token_limit, 0, tokens))

    async def check_write(self, caller: Caller) -> None:
        """Count a write against its key's rate; raise ApiError (429), or StoreUnavailable."""
        limit = WRITES_PER_MINUTE
        taken = await self._rates.put(Take(f"{caller.owner}:writes", limit, None, 1, 0))
        if not taken.allowed:
            message = f"a key may make {limit} writing calls per minute"
            raise _wait_error(message, taken.wait_ms, _rate_headers(limit, None, taken))

    async def check_refusals(self, caller: Caller) -> None:
        """Raise ApiError (429) if a key has too many stored refusals."""
        limit = REFUSED_PER_MINUTE
        taken = await self._rates.put(Take(f"{caller.owner}:refused", None, limit, 1, 0))
        if not taken.allowed:
            message = f"a key may have {limit} refused calls with an Idempotency-Key a minute"
            raise _wait_error(message, taken.wait_ms, {})

    def note_refusal(self, caller: Caller) -> None:
        """Count a stored refusal, without waiting."""
        self._rates.put(Take(f"{caller.owner}:refused", None, REFUSED_PER_MINUTE, 0, 1))

    def reserve(
        self, caller: Caller, batch_id: str, tokens: Mapping[str, int], what: str = "batch"
    ) -> None:
        """Reserve tokens of the tenant's budget for a batch or response, by model ('' if unknown).

        They replace the tokens that it has reserved before; `give_back` returns them at its end.
        Raises ApiError (429), and changes nothing, if the budget is too small.
        """
        limit, tenant = caller.enqueued_tokens, caller.tenant
        refused = self._budgets.reserve(tenant, batch_id, tokens, limit)
        if refused is not None and self._budgets.give_back_of_ended(tenant):
            refused = self._budgets.reserve(tenant, batch_id, tokens, limit)
        if refused is not None and limit is not None:
            left = max(0, limit - refused.held)
            of_model = f" of model {refused.model}" if refused.model else ""
            raise _over_budget(
                f"Enqueued token limit reached: the {what} asks for about {tokens[refused.model]} "
                f"tokens{of_model}, and {left} of {limit} are left; they come back as batches and "
                "background responses end, or are cancelled"
            )

    def give_back(self, batch_id: str) -> None:
        """Return the reserved tokens of a batch or response to the budget, at its end."""
        self._budgets.give_back(batch_id)

    def check_bytes(self, caller: Caller, size: int, body: int | None = None) -> None:
        """Raise ApiError (429) if `size` more bytes exceed the limit.

        The file may be stored only after `check_and_count_bytes`. `body` is the size of the
        request's body, which the error names if the file's size is not known.
        """
        limit = caller.file_bytes
        if limit is not None and (held := self._stored(caller.tenant, limit - size)) + size > limit:
            subject = f"the file has {size}" if body is None else f"the request's body has {body}"
            raise _too_many_bytes(subject, held, limit)

    def check_stored(self, caller: Caller) -> None:
        """Raise ApiError (429) if the tenant's files exceed its limit already.

        The files may exceed it because output files are always stored.
        """
        limit = caller.file_bytes
        if limit is not None and (held := self._stored(caller.tenant, limit)) > limit:
            raise _over_budget(
                f"File storage limit reached: files have {held} bytes, output files included, and "
                f"{limit} are allowed; delete files you do not need, or wait until they expire"
            )

    def _stored(self, tenant: str, most: int) -> int:
        """Return the bytes of a tenant's files; above `most`, forget missing files first."""
        held = self._budgets.stored_bytes(tenant)
        if held > most and self._budgets.forget_files_that_have_gone(tenant):
            held = self._budgets.stored_bytes(tenant)
        return held

    def count_bytes(self, tenant: str, file_id: str, size: int) -> None:
        """Count a file's bytes even above the limit, so that no answer is lost."""
        self._budgets.note_bytes(tenant, file_id, size, None)

    def check_and_count_bytes(self, caller: Caller, file_id: str, size: int) -> None:
        """Count a file's bytes; repeated calls count them once.

        Raises ApiError (429) if they exceed the limit: the file is not counted and must not be
        stored.
        """
        limit, tenant = caller.file_bytes, caller.tenant
        refused = self._budgets.note_bytes(tenant, file_id, size, limit)
        if refused is not None and self._budgets.forget_files_that_have_gone(tenant):
            refused = self._budgets.note_bytes(tenant, file_id, size, limit)
        if refused is not None and limit is not None:
            raise _too_many_bytes(f"the file has {size}", refused.held, limit)

    def forget_bytes(self, tenant: str, file_id: str) -> None:
        """Stop counting a file's bytes; `tenant` is '' if it is unknown."""
        self.count_bytes(tenant, file_id, 0)

    def check_records(self, caller: Caller) -> None:
        """Raise ApiError (429) if a tenant's records in Redis have reached their limit.

        These are the records of files, uploads, batches and background responses. The limit holds
        for every key: no tenant may fill the Redis that all tenants share.
        """
        records, tenant = Records.using(self._budgets), caller.tenant
        if time.monotonic() - self._max_records_at >= _MAX_MEMORY_LIFE_S:
            self._max_records, self._max_records_at = records.most_bytes(), time.monotonic()
        most, held = self._max_records, records.bytes_of(tenant)
        if held >= most and records.forget_gone(tenant):
            held = records.bytes_of(tenant)
        if held >= most:
            raise _over_budget(
                "Record limit reached: the records of your files, uploads, batches and background "
                f"responses take {held} bytes, and {most} are allowed, metadata and inputs "
                "included; delete files (DELETE /v1/files/ID) and responses (DELETE "
                "/v1/responses/ID) that you do not need, or wait: the record of a batch expires 30 "
                "days after its end, that of an upload after a day. The operator can delete "
                "records sooner"
            )


def check_model(caller: Caller, model: str) -> None:
    """Raise ApiError (403) if the caller's key does not allow a model."""
    if not caller.may_use(model):
        allowed = ", ".join(sorted(caller.models or ()))
        raise ApiError(
            403, f"this key may not use the model {model[:200]!r}; it may use {allowed}",
            code="model_not_allowed", param="model",
        )  # fmt: skip


def _too_many_bytes(subject: str, held: int, limit: int) -> ApiError:
    left = f"{max(0, limit - held)} of {limit}"
    return _over_budget(
        f"File storage limit reached: {subject} bytes, and {left} are left; they come back as "
        "files are deleted or expire"
    )


def _over_budget(message: str) -> ApiError:
    return ApiError(429, message, code="insufficient_quota", type="insufficient_quota", retry=False)


def _wait_error(why: str, wait_ms: int, headers: Mapping[str, str]) -> ApiError:
    """Return the error for a rate that allows the request after `wait_ms`."""
    message = f"Rate limit reached: {why}; try again in {go_duration(wait_ms)}"
    # The header has whole seconds: 0.5 s more, so that rounding does not shorten the wait.
    after_s = wait_ms / 1000 + 0.5
    return _rate_error(message, {**headers, "retry-after-ms": str(wait_ms)}, after_s=after_s)


def _rate_error(message: str, headers: Mapping[str, str], **options: Any) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers, **options)


def go_duration(ms: int) -> str:
    """Return a duration in Go's notation, which OpenAI's headers use: 12ms, 1.5s, 6m0s."""
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text


def _rate_headers(
    request_limit: int | None, token_limit: int | None, taken: Taken
) -> dict[str, str]:
    """Return the `x-ratelimit-*` headers of the limits that exist."""
    headers = {}
    for name, limit, left, full_ms in (
        ("requests", request_limit, taken.requests_left, taken.requests_full_ms),
        ("tokens", token_limit, taken.tokens_left, taken.tokens_full_ms),
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(left)
            headers[f"x-ratelimit-reset-{name}"] = go_duration(full_ms)
    return headers
