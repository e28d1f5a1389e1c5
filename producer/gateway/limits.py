"""What a caller may use: rates of online requests, tokens of batches, bytes of files."""

from __future__ import annotations

from collections.abc import Mapping

from contract.redis.gateway.gathering import Gathering
from contract.redis.gateway.limits import Budgets, Rates, Take
from producer.gateway.caller import Caller
from producer.gateway.errors import ApiError
from producer.gateway.rate_answers import rate_headers, too_fast

#: Bytes of JSON for a token of a prompt: about 4 in English, fewer in other languages. An estimate
#: need not be right: it is what a batch holds of a budget while it is there.
BYTES_PER_TOKEN = 4


def estimated_tokens(size: int) -> int:
    """Return about how many tokens the prompts of a file (or body) of so many bytes have."""
    return -(-size // BYTES_PER_TOKEN)


class Allowance:
    """What an online request was allowed. Its `headers` go on the answer."""

    def __init__(
        self, limits: Limits | None = None, caller: Caller | None = None, tokens: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.headers = headers or {}
        self._limits, self._caller, self._tokens = limits, caller, tokens

    def settle(self, tokens: int) -> None:
        """Say what the request has used, of prompt and answer; 0 if it was not run.

        It returns at once; a correction that Redis does not take is lost, which a minute heals.
        """
        taken, self._tokens = self._tokens, tokens
        if self._limits is not None and self._caller is not None and tokens != taken:
            self._limits.correct(self._caller, tokens - taken)


_FREE = Allowance()


class Limits:
    """Limits of a gateway's callers. All but the online ones are sync, for handlers in threads."""

    def __init__(self, rates: Rates, budgets: Budgets) -> None:
        self._rates = Gathering(rates.take)
        self._budgets = budgets

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
            counted = self if tokens_limit else None
            return Allowance(counted, caller, tokens, headers)
        raise too_fast(caller, tokens, taken, headers)

    def correct(self, caller: Caller, tokens: int) -> None:
        """Take so many more tokens of a key's rate, or give back (negative), without waiting."""
        limit = caller.tokens_per_minute
        self._rates.put(Take(caller.key_id, caller.requests_per_minute, limit, 0, tokens))

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

    def check_bytes(self, caller: Caller, size: int) -> None:
        """Raise ApiError (429) if a file of so many bytes would not fit, before it is read.

        It counts nothing: `note_bytes` decides.
        """
        limit = caller.file_bytes
        if limit is None:
            return
        held = self._budgets.stored_bytes(caller.tenant)
        if held + size > limit and self._budgets.forget_files_that_have_gone(caller.tenant):
            held = self._budgets.stored_bytes(caller.tenant)
        if held + size > limit:
            raise _too_many_bytes(size, held, limit)

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
            raise _too_many_bytes(size, refused.held, limit)

    def forget_bytes(self, tenant: str, file_id: str) -> None:
        """Count a file's bytes no more; the tenant may be '' where it is not known."""
        self._budgets.note_bytes(tenant, file_id, 0, None)


def check_model(caller: Caller, model: str) -> None:
    """Raise ApiError (403) if the caller's key does not allow a model."""
    if not caller.may_use(model):
        allowed = ", ".join(sorted(caller.models or ()))
        raise ApiError(
            403, f"this key may not use the model {model[:200]!r}; it may use {allowed}",
            code="model_not_allowed", param="model",
        )  # fmt: skip


def _too_many_bytes(size: int, held: int, limit: int) -> ApiError:
    return _over_budget(
        f"File storage limit reached: the file has {size} bytes, and {max(0, limit - held)} of "
        f"{limit} are left; they come back as files are deleted or expire"
    )


def _over_budget(message: str) -> ApiError:
    return ApiError(429, message, code="insufficient_quota", type="insufficient_quota", retry=False)
