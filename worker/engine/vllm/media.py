"""Lets vLLM fetch images, audio and video of requests from public addresses only.

vLLM limits the time, size and host names of downloads, but not addresses. A name may lead to this
machine or its network: directly, by a redirect, or by a DNS answer that changes after a check. So
the address is checked at the moment of the connection.
"""

import socket
from collections.abc import Callable
from typing import Any

import aiohttp

from contract.public_address import is_public

#: Most megabytes of one file. vLLM's default is 256; hundreds of requests in flight could each
#: hold such a file in memory.
MAX_DOWNLOAD_MB = 64
#: Most pixels of one image: 4096 x 3072, as in a phone's photo; models read far fewer. A huge image
#: in one colour is only some kilobytes of PNG. vLLM's default is PIL's, 179 million.
MAX_IMAGE_PIXELS = 12_582_912
#: Most images, videos and audio files of one request. A decoded pixel takes 12 bytes, so that
#: images take at most 1 GB. vLLM's default is 999 of each.
MAX_MEDIA = {"image": 6, "video": 1, "audio": 4}


class _NoBlockingFetch:
    """Replaces vLLM's blocking HTTP client, which some of its pooling endpoints use."""

    def __init__(self, refused: Callable[[str], Exception]) -> None:
        self._refused = refused
        #: The number of engines of this process whose requests use the connection.
        self.engines = 1

    def get(self, *_: Any, **__: Any) -> Any:
        raise self._refused("media URLs are not fetched for this endpoint; send a data URL")


def guard(connection: Any, refused: Callable[[str], Exception]) -> None:
    """Restrict one of vLLM's connections to public addresses. Must be called on the loop.

    Each engine of this process calls it once; `unguard` ends the restriction after as many
    calls.
    """
    if isinstance(connection._sync_client, _NoBlockingFetch):
        connection._sync_client.engines += 1
        return
    connection._async_client = guarded_session(refused)
    connection._sync_client = _NoBlockingFetch(refused)


def unguard(connection: Any) -> None:
    """Drop the session of a restricted connection. Can be called in any thread."""
    client = connection._sync_client
    if not isinstance(client, _NoBlockingFetch):
        return
    client.engines -= 1
    if not client.engines:
        connection._async_client.detach()
        connection._async_client = connection._sync_client = None


def guarded_session(
    refused: Callable[[str], Exception], allowed: Callable[[str], bool] = is_public
) -> aiohttp.ClientSession:
    """Return a session that connects only to allowed addresses.

    The session ignores proxies that the environment sets, because the address behind a proxy is not
    known.

    Args:
        refused: makes the error to raise; not an OSError, which aiohttp would retry.
        allowed: returns whether an IP address is allowed.
    """

    def connect(info: Any) -> socket.socket:
        family, socket_type, protocol, _, address = info
        if not allowed(str(address[0])):
            raise refused(
                f"a media URL leads to {address[0]}, which is not a public address; name a public "
                "URL or send a data URL (the operator may set WARMQ_MEDIA_PRIVATE_NETWORKS)"
            )
        return socket.socket(family, socket_type, protocol)

    # Without Happy Eyeballs, which would wrap the error in another.
    connector = aiohttp.TCPConnector(socket_factory=connect, happy_eyeballs_delay=None)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
