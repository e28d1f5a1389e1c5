"""One event as OpenAI sends it, signed as Standard Webhooks prescribes, in a POST to an address
that a tenant has named: bounded in time and size, public addresses only.

A name may lead to this machine or into its network, at once or by a DNS answer that changes
between check and use. So the check is made on the address that is then connected to. Redirects are
not followed and proxies of the environment not used: behind one, nobody here sees the address.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import time
from collections.abc import Iterable
from ssl import SSLContext
from typing import Any

import httpcore
import orjson

from contract.public_address import is_public
from gateway.redis.webhooks import Delivery

#: A receiver has so long to take a connection, and so long for all of the rest.
CONNECT_S, WHOLE_S = 5.0, 10.0
#: So much of an answer is read; only its status matters.
_READ_BYTES = 16 * 1024


class NotDelivered(Exception):
    """There was no answer; the text says why, and names neither URL nor secret."""


def body_of(delivery: Delivery) -> bytes:
    """Return the JSON of an event: byte for byte the same on each try."""
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

    The id is that of the delivery on each try, the time and so the signature those of the try:
    receivers take no signature that is older than five minutes.
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


class _Bounded(httpcore.NetworkStream):
    """A connection that ends at `until` (monotonic s), however slowly the other side sends."""

    def __init__(self, stream: httpcore.NetworkStream, until: float) -> None:
        self._stream = stream
        self._until = until

    def _left(self, error: type[Exception]) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise error("out of time")
        return left

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._left(httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._left(httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        left = self._left(httpcore.ConnectTimeout)
        return _Bounded(self._stream.start_tls(ssl_context, server_hostname, left), self._until)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Guarded(httpcore.NetworkBackend):
    """Resolves names itself, and connects to addresses that it has checked."""

    def __init__(self, private: bool, until: float) -> None:
        self._private = private
        self._until = until
        self._plain = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise httpcore.ConnectError("its name cannot be resolved") from None
        addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        allowed = [a for a in addresses if self._private or is_public(a)]
        if not allowed:
            raise NotDelivered(
                "its name leads to no public address (WARMQ_GATEWAY_PRIVATE_WEBHOOKS allows others)"
            )
        last: Exception = httpcore.ConnectError("it has no address")
        for address in allowed[:4]:
            left = min(CONNECT_S, self._until - time.monotonic())
            if left <= 0:
                break
            try:
                stream = self._plain.connect_tcp(address, port, left, None, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
            else:
                return _Bounded(stream, self._until)
        raise last


def post(url: str, body: bytes, headers: dict[str, str], *, private: bool) -> int:
    """Send a body; return the status of the answer.

    With `private` addresses may be of any kind, as WARMQ_GATEWAY_PRIVATE_WEBHOOKS says.

    Raises:
        NotDelivered: nothing was answered within 10 s, or nobody may be asked.
    """
    backend = _Guarded(private, time.monotonic() + WHOLE_S)
    told = {"user-agent": "warmq-webhooks", "accept": "*/*", "connection": "close"} | headers
    try:
        with (
            httpcore.ConnectionPool(network_backend=backend) as pool,
            pool.stream("POST", url, headers=[*told.items()], content=body) as answer,
        ):
            size = 0
            for piece in answer.iter_stream():
                size += len(piece)
                if size > _READ_BYTES:
                    break
            return int(answer.status)
    except httpcore.TimeoutException as error:
        raise NotDelivered(f"no answer in time ({type(error).__name__})") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol) as error:
        # What the other side has sent may be in the text: its kind says enough.
        raise NotDelivered(f"no answer ({type(error).__name__})") from None
