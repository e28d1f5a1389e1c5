"""Posts one event in the format of OpenAI's webhooks, signed as Standard Webhooks prescribes.

The URL is a tenant's: its name may resolve to this machine or its network, even by a DNS answer
that changes between check and use. So this connects to the same address that it has checked.
Redirects are not followed and proxies of the environment are not used: they would hide the address.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import socket
from collections.abc import Iterable
from typing import Any

import httpcore
import orjson

from contract.public_address import is_public
from gateway.redis.webhooks import Delivery

#: Most seconds for the connection, and for the whole POST.
CONNECT_S, WHOLE_S = 5.0, 10.0
#: Most bytes that are read of an answer, of which only the status is used.
_READ_BYTES = 16 * 1024


class NotDelivered(Exception):
    """The receiver did not answer; the text has the reason, but neither URL nor secret."""


def body_of(delivery: Delivery) -> bytes:
    """Return the JSON of an event, the same bytes on each try."""
    event_id = hashlib.sha256(f"{delivery.batch_id}\0{delivery.event}".encode()).hexdigest()[:32]
    return orjson.dumps({
        "id": f"evt_{event_id}",
        "object": "event",
        "type": delivery.event,
        "created_at": delivery.created_at,
        "data": {"id": delivery.batch_id},
    })  # fmt: skip


def headers_of(delivery: Delivery, body: bytes, secret: str, now: int) -> dict[str, str]:
    """Return the headers by which a receiver verifies a try made `now` (s since 1970).

    Each try has a new signature: receivers refuse one that is older than five minutes.
    """
    signed = b".".join((delivery.id.encode(), str(now).encode(), body))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {
        "content-type": "application/json",
        "webhook-id": delivery.id,
        "webhook-timestamp": str(now),
        "webhook-signature": f"v1,{signature}",
    }


class _Guarded(httpcore.AsyncNetworkBackend):
    """Resolves names itself, and connects only to addresses that it has checked."""

    def __init__(self, private: bool) -> None:
        self._private = private
        self._plain = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            # This loop has nothing else to do, and a thread would outlive the timeout.
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise httpcore.ConnectError("its name cannot be resolved") from None
        addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        allowed = [a for a in addresses if self._private or is_public(a)]
        if not allowed:
            raise NotDelivered(
                "its name has no public address (WARMQ_GATEWAY_PRIVATE_WEBHOOKS=true allows all)"
            )
        last: Exception = httpcore.ConnectError("it has no address")
        for address in allowed[:4]:
            try:
                return await self._plain.connect_tcp(address, port, CONNECT_S, None, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
        raise last


def post(url: str, body: bytes, headers: dict[str, str], *, private: bool) -> int:
    """Post a body; return the status, or raise NotDelivered. `private` allows any address."""
    headers = {"user-agent": "warmq-webhooks", "accept": "*/*", "connection": "close"} | headers
    try:
        return asyncio.run(_post(url, body, [*headers.items()], private))
    except (httpcore.TimeoutException, TimeoutError) as error:
        raise NotDelivered(f"no answer in time ({type(error).__name__})") from None
    except (
        httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError
    ) as error:  # fmt: skip
        # httpcore raises TLS errors as OSError. The texts may quote the receiver, so only the
        # error's type is reported.
        raise NotDelivered(f"no answer ({type(error).__name__})") from None


async def _post(url: str, body: bytes, headers: list[tuple[str, str]], private: bool) -> int:
    async with (
        asyncio.timeout(WHOLE_S),
        httpcore.AsyncConnectionPool(network_backend=_Guarded(private)) as pool,
        pool.stream("POST", url, headers=headers, content=body) as answer,
    ):
        size = 0
        async for piece in answer.aiter_stream():
            size += len(piece)
            if size > _READ_BYTES:
                break
        return int(answer.status)
