"""Posts one event in the format of OpenAI's webhooks, signed as Standard Webhooks prescribes.

The URL is a tenant's: its name may resolve to this machine or its network, even by a DNS answer
that changes between check and use. So `post` connects to the address that it has checked.
Redirects are not followed and proxies of the environment are not used, because they would connect
to an address that was not checked.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import socket
import ssl
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

import orjson

from contract.public_address import is_public

#: Most seconds for the connection, and for the whole POST.
CONNECT_S, WHOLE_S = 5.0, 10.0
#: Most bytes of a line of an answer; most addresses of a name that are tried.
_LINE_BYTES, _ADDRESSES = 16 * 1024, 4
#: Most characters of a URL.
_LONGEST_URL = 2048
#: Random bytes of a secret; Standard Webhooks asks for 24 to 64.
_SECRET_BYTES = 32
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)[ \r\n]")


class NotDelivered(Exception):
    """The event was not delivered; the text has the reason, but neither URL nor secret."""


def new_secret() -> str:
    """Return a new secret, with which events are signed."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()}"


def check_url(text: str) -> str:
    """Return the URL of an endpoint; raise ValueError with the rule that the URL breaks."""
    try:
        parts = urlsplit(text)
        has_parts = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a malformed port or IPv6 address
        has_parts = False
    plain = text.isascii() and text.isprintable() and " " not in text
    if not has_parts or not plain or len(text) > _LONGEST_URL:
        raise ValueError(
            f"give http:// or https://, a host and a path, of at most {_LONGEST_URL} ASCII "
            "characters"
        )
    if "@" in parts.netloc or parts.fragment:
        raise ValueError(
            "leave out user, password and fragment; receivers verify the signature instead"
        )
    return text


def is_private(url: str) -> bool:
    """Return whether a URL's host is an address that is not public, or localhost.

    Other names are not resolved, so that a command does not wait for DNS.
    """
    host = (urlsplit(url).hostname or "").removesuffix(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        infos = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):  # a name
        return False
    return not any(is_public(str(info[4][0])) for info in infos)


def private_text(senders: str) -> str:
    """Return what `senders` (workers or gateways) need to deliver to a private host."""
    return (
        f"{senders} deliver to public addresses only, unless WARMQ_GATEWAY_PRIVATE_WEBHOOKS=true "
        "is set for them"
    )


def body_of(batch_id: str, event: str, created_at: int, end: str = "") -> bytes:
    """Return the JSON of an event, the same bytes on each try.

    `end` identifies a batch's end: it differs after each retry, so that the events have different
    ids.
    """
    name = "\0".join([batch_id, event, *([end] if end else [])])
    event_id = hashlib.sha256(name.encode()).hexdigest()[:32]
    return orjson.dumps({
        "id": f"evt_{event_id}",
        "object": "event",
        "type": event,
        "created_at": created_at,
        "data": {"id": batch_id},
    })  # fmt: skip


def headers_of(webhook_id: str, body: bytes, secret: str, now: int) -> dict[str, str]:
    """Return the headers by which a receiver verifies a try made `now` (s since 1970).

    Each try has a new signature: receivers refuse one that is older than five minutes.
    """
    signed = b".".join((webhook_id.encode(), str(now).encode(), body))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {
        "content-type": "application/json",
        "webhook-id": webhook_id,
        "webhook-timestamp": str(now),
        "webhook-signature": f"v1,{signature}",
    }


def post(url: str, body: bytes, headers: dict[str, str], *, private: bool) -> int:
    """Post a body; return the status, or raise NotDelivered. `private` allows private addresses."""
    try:
        return asyncio.run(_post(urlsplit(url), body, headers, private))
    except TimeoutError:
        raise NotDelivered("no answer in time") from None
    except (OSError, ValueError, EOFError) as error:  # TLS errors are OSErrors
        # The errors' texts may quote the endpoint, so only the error's type is reported.
        raise NotDelivered(f"no answer ({type(error).__name__})") from None


async def _post(url: SplitResult, body: bytes, headers: dict[str, str], private: bool) -> int:
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    fields = {
        "host": url.netloc, "user-agent": "warmq-webhooks", "accept": "*/*", "connection": "close",
        "content-length": str(len(body)), **headers,
    }  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    async with asyncio.timeout(WHOLE_S):
        reader, writer = await _connect(url, private)
        try:
            writer.write(f"POST {target} HTTP/1.1\r\n{head}\r\n".encode("ascii") + body)
            return await _read_status(reader)
        finally:
            writer.transport.abort()


async def _connect(
    url: SplitResult, private: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an allowed address of the URL's host."""
    host, tls = url.hostname or "", url.scheme == "https"
    port = url.port or (443 if tls else 80)
    # This call may block: the loop has nothing else to do, and a thread would outlive the timeout.
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
    allowed = [a for a in addresses if private or is_public(a)]
    if not allowed:
        raise NotDelivered(
            "the URL's host has no public address (WARMQ_GATEWAY_PRIVATE_WEBHOOKS=true allows all)"
        )
    context, name = (_tls_context(), host) if tls else (None, None)
    last: OSError = OSError("the URL's host has no address")
    for address in allowed[:_ADDRESSES]:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(
                    address, port, limit=_LINE_BYTES, ssl=context, server_hostname=name
                )
        except OSError as error:
            last = error
    raise last


def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    with suppress(ImportError):  # some images have no other certificates
        import certifi  # noqa: PLC0415

        context.load_verify_locations(certifi.where())
    return context


async def _read_status(reader: asyncio.StreamReader) -> int:
    """Return the status of the answer, after any answers that only inform (1xx)."""
    while True:
        found = _STATUS.match(await reader.readline())
        if found is None:
            raise EOFError
        while (header := await reader.readline()).strip():
            pass
        if not header:  # the connection ended before the empty line
            raise EOFError
        if (status := int(found[1])) >= 200:
            return status
