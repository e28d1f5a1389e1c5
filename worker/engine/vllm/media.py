"""Lets the image, audio and video URLs of requests be fetched from public addresses only.

vLLM limits time, size and host names, but not addresses: a name may lead to this machine or into
its network, at once, by a redirect, or by a DNS answer that changes between check and use. So the
check is made on the address that is about to be connected to.
"""

import socket
from collections.abc import Callable
from typing import Any

import aiohttp

from contract.public_address import is_public

#: vLLM's own default is 256 MB for each file, with hundreds of requests in flight.
MAX_DOWNLOAD_MB = 64
#: Of one picture: 4096 x 3072, a telephone's photo. A flat one of that size is some kilobytes of
#: PNG, and models look at far fewer pixels. vLLM's own default, PIL's, is 179 million.
MAX_IMAGE_PIXELS = 12_582_912
#: Of one request. Decoded and made numbers of, a pixel takes 12 bytes: 1 GB at most. vLLM's own
#: default is 999 of each.
MAX_MEDIA = {"image": 6, "video": 1, "audio": 4}


class _NoBlockingFetch:
    """In the place of vLLM's other client, which some of its endpoints for pooling use."""

    def __init__(self, refused: Callable[[str], Exception]) -> None:
        self._refused = refused

    def get(self, *_: Any, **__: Any) -> Any:
        raise self._refused("media URLs are not fetched for this endpoint; send a data URL")


def guard(connection: Any, refused: Callable[[str], Exception]) -> None:
    """Let a connection of vLLM's fetch from public addresses only; call it on the loop."""
    connection._async_client = guarded_session(refused)
    connection._sync_client = _NoBlockingFetch(refused)


def unguard(connection: Any) -> None:
    """Let go of the session; from any thread."""
    if isinstance(connection._sync_client, _NoBlockingFetch):
        connection._async_client.detach()
        connection._async_client = connection._sync_client = None


def guarded_session(
    refused: Callable[[str], Exception], allowed: Callable[[str], bool] = is_public
) -> aiohttp.ClientSession:
    """Return a session that connects to allowed addresses only, whatever name led there.

    Proxies of the environment are not used: behind one, nobody here sees the address.

    Args:
        refused: makes the error to raise; no OSError, which would be tried again.
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
