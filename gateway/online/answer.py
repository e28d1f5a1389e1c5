"""What comes of a request: vLLM's bytes as they were stored, or the error to be told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from contract.errors import RequestRejected, WarmqError
from contract.results import body_of, error_of
from gateway.http.errors import ApiError, of_warmq, stopping
from gateway.online.waiter import Gone, Late, Waiter


async def answer_of(waiter: Waiter, lasts_s: float) -> bytes | None:
    """Return the response's JSON; None if the caller has gone.

    Raises:
        ApiError, StoreUnavailable: why there is none.
    """
    try:
        meta = await waiter.ending
    except asyncio.CancelledError:
        raise stopping() from None
    except Gone:
        return None
    except Late:
        raise _late(lasts_s) from None
    body = body_of(meta)
    if body is None:
        raise _of_result(error_of(meta), lasts_s)
    return body


def header_pairs(headers: Mapping[str, str]) -> Iterable[tuple[bytes, bytes]]:
    """Return headers as ASGI takes them."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _late(lasts_s: float) -> ApiError:
    return ApiError(
        503,
        f"no answer within {lasts_s:g} s, the request was given up; try again later, or send it "
        "in a batch",
        code="request_timeout",
        after_s=5,
    )


def _of_result(error: WarmqError, lasts_s: float) -> ApiError:
    """Return the answer for a request that ended without a response."""
    if isinstance(error, RequestRejected) and error.field:
        error.field = error.field.removeprefix("body.")
    elif error.code == "expired":
        return _late(lasts_s)
    elif error.code in ("poison", "result_too_large", "result_refused"):
        return ApiError(500, error.message, code=error.code, retry=False)
    elif error.code == "cancelled":
        return ApiError(503, "the request was cancelled", code=error.code, retry=False)
    return of_warmq(error)
