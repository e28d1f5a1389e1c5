"""Reads the first failed requests of each error code of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from contract.batch import Batch
from contract.failures import failures_of
from contract.redis import keys
from contract.redis.reads import Reads
from contract.results import read_meta

#: Most characters of a failure's message; the request's result has it whole.
MESSAGE_CHARACTERS = 300


class FailedRequest(msgspec.Struct, frozen=True):
    """One failed request; None where its result does not have the value."""

    custom_id: str | None
    request_id: str
    line: int | None
    message: str


class FailedCode(msgspec.Struct, frozen=True):
    """The failed lines with one error code, and the first of their requests.

    The code is '' for failures that workers of 0.2.0 ended.
    """

    code: str
    count: int
    first: list[FailedRequest] = []


#: Field of a run's record with the first failed requests of the windows that are gone, as JSON.
FIRST_FAILED = "first_failed"
_decode = msgspec.json.Decoder(list[FailedRequest]).decode


class FailureReads(Reads):
    """Reads failures in one Redis. Calls raise StoreUnavailable."""

    def first(self, batches: Sequence[Batch]) -> list[FailedCode]:
        """Return the failures of one or several queue batches, the most frequent code first.

        Takes at most one round trip. A request whose result is gone is left out, unless the record
        of its run has it.
        """
        codes = failures_of(batches)
        ids = [request_id for one in codes for request_id in one.first]
        raws = self._client.mget([keys.result_key(one) for one in ids]) if ids else []
        kept = (one for batch in batches for one in _decode(batch.fields.get(FIRST_FAILED) or "[]"))
        found = {one.request_id: one for one in kept}
        found |= {rid: _failed(rid, raw) for rid, raw in zip(ids, raws, strict=True) if raw}
        return [
            FailedCode(one.code, one.count, [found[rid] for rid in one.first if rid in found])
            for one in codes
        ]

    def kept(self, run: Batch) -> dict[str, str]:
        """Return the field with a run's first failed requests; its record keeps it."""
        first = [one for code in self.first([run]) for one in code.first]
        return {FIRST_FAILED: msgspec.json.encode(first).decode()}


def _failed(request_id: str, raw: bytes) -> FailedRequest:
    ours = read_meta(raw).get("warmq") or {}
    message = str((ours.get("error") or {}).get("message") or "")
    if len(message) > MESSAGE_CHARACTERS:
        message = message[: MESSAGE_CHARACTERS - 1] + "…"
    return FailedRequest(ours.get("custom_id"), request_id, ours.get("line"), message)
