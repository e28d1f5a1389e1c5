"""Fetch image, audio and video URLs of requests from public addresses only.

vLLM limits time, size and host names, but not addresses: a name may lead into this machine or its
network, directly, by a redirect, or by a DNS answer that changes after a check. So the address is
checked when it is connected to.
"""

import socket
from collections.abc import Callable
from typing import Any

import aiohttp

from contract.public_address import is_public

#: vLLM's default is 256 MB a file, with hundreds of requests in flight.
MAX_DOWNLOAD_MB = 64
#: Of one picture: 4096 x 3072, a phone's photo. In one colour it is some kilobytes of PNG, and
#: models read far fewer pixels. vLLM's default is PIL's, 179 million.
MAX_IMAGE_PIXELS = 12_582_912
#: Of one request. A decoded pixel takes 12 bytes: 1 GB at most. vLLM's default is 999 of each.
MAX_MEDIA = {"image": 6, "video": 1, "audio": 4}


class _NoBlockingFetch:
    """Replaces vLLM's blocking client, which some of its endpoints for pooling use."""

    def __init__(self, refused: Callable[[str], Exception]) -> None:
        self._refused = refused

    def get(self, *_: Any, **__: Any) -> Any:
        raise self._refused("media URLs are not fetched for this endpoint; send a data URL")


def guard(connection: Any, refused: Callable[[str], Exception]) -> None:
    """Restrict one of vLLM's connections to public addresses; call it on the loop."""
    connection._async_client = guarded_session(refused)
    connection._sync_client = _NoBlockingFetch(refused)


def unguard(connection: Any) -> None:
    """Drop the session; from any thread."""
    if isinstance(connection._sync_client, _NoBlockingFetch):
        connection._async_client.detach()
        connection._async_client = connection._sync_client = None


def guarded_session(
    refused: Callable[[str], Exception], allowed: Callable[[str], bool] = is_public
) -> aiohttp.ClientSession:
    """Return a session that connects to allowed addresses only.

    It ignores the environment's proxies, behind which the address is not known.

    Args:
        refused: makes the error to raise; no OSError, which aiohttp would retry.
        allowed: takes an IP address.
    """

    def connect(info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        if not allowed(str(address[0])):
            raise refused(
                f"a media URL leads to {address[0]}, which is no public address; name a public "
                "URL or send a data URL (the operator may set WARMQ_MEDIA_PRIVATE_NETWORKS)"
            )
        return socket.socket(family, kind, protocol)

    # One address after another: racing them would wrap the error.
    connector = aiohttp.TCPConnector(socket_factory=connect, happy_eyeballs_delay=None)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
