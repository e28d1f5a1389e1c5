"""Authenticates callers by API key; if no keys exist, accepts only this machine's programs."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from contract.errors import WarmqError
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, api_error, invalid, send_error
from gateway.page.view import LIVE, LOGIN, is_asset, is_page, refuse_page, to_login, token_in
from gateway.redis.api_keys import ApiKeys, FoundKey, KeyLookup, Sessions, digest_of
from gateway.redis.async_calls import CallCombiner

log = logging.getLogger(__name__)

#: Paths that need no key: health checks, metrics, and the API's description.
OPEN = frozenset(("/health", "/ready", "/version", "/metrics", "/openapi.json"))
#: Seconds after which a cached key is looked up again in the background, and seconds after which a
#: request waits for this lookup. A revoked key must stop working within a second in every gateway.
FRESH_S, LAST_S = 0.4, 0.9
#: Largest number of cached keys. Wrong keys are not cached: there may be any number of them.
MOST_KEYS = 10_000

#: Names of headers that proxies, load balancers and networks add to requests.
_PROXY_HEADERS = frozenset((
    b"forwarded", b"via", b"x-real-ip", b"true-client-ip", b"x-client-ip", b"client-ip",
    b"x-cluster-client-ip", b"fastly-client-ip", b"x-remote-ip", b"x-remote-addr", b"x-real-port",
    b"x-proxyuser-ip", b"wl-proxy-client-ip", b"proxy-client-ip", b"x-host", b"x-scheme",
    b"x-varnish", b"x-http-forwarded-for", b"cdn-loop", b"front-end-https", b"x-url-scheme",
    b"x-script-name",
))  # fmt: skip
#: Prefixes of the names of further headers that proxies add.
_PROXY_PREFIXES = (
    b"x-forwarded", b"x-original-", b"cf-", b"x-envoy-", b"x-azure-", b"x-arr-", b"x-amz-cf-",
    b"fly-", b"x-vercel-", b"x-goog-iap", b"x-appengine-", b"x-proxy-", b"tailscale-", b"x-nginx-",
)  # fmt: skip

_WRONG = "Incorrect API key provided: it is unknown or was revoked; `producer keys list` shows all"
_MISSING = (
    "You didn't provide an API key: send it as `Authorization: Bearer sk-...` or as `x-api-key`"
)
Headers = Mapping[bytes, bytes]


class KeyMissing(WarmqError):
    """Raised at the start: without API keys the gateway would be open to the network."""

    code = "no_keys"


def check_address(host: str, keys: ApiKeys) -> None:
    """Raise KeyMissing if a gateway without keys would be reachable from other machines."""
    if keys.any():
        return
    if is_loopback(host):
        log.warning(
            "the gateway has no API keys: every program on this machine may use it, and so may "
            "clients of a proxy on this machine that adds no headers; before you run a proxy, "
            "create a key: `producer keys create --tenant NAME`",
            extra={"action": "no_keys"},
        )
    else:
        raise KeyMissing(
            f"the gateway has no API keys, and anybody who reaches {host} could use it: create one "
            "with `producer keys create --tenant NAME`, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address or name belongs to this machine only."""
    if _local_name(host.strip("[]")):
        return True
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(
        ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses
    )


class WrongKey(ApiError):
    """401: the key is unknown, revoked, or missing.

    `no_keys`: no keys exist, and the caller is not a program on this machine.
    """

    def __init__(self, message: str, *, no_keys: bool = False) -> None:
        super().__init__(401, message, code="invalid_api_key", type="invalid_request_error")
        self.no_keys = no_keys


class CallerCache:
    """Finds keys' callers in combined calls to Redis, and caches them for a second."""

    def __init__(self, lookup: KeyLookup) -> None:
        self._lookup = CallCombiner(lookup.find)
        self._known: dict[str, tuple[float, Caller | None]] = {}
        self._no_keys: tuple[float, Caller | None] | None = None  # set if Redis had no keys
        self._asking: dict[str, asyncio.Task[Caller | None]] = {}

    async def of(self, digest: str) -> Caller | None:
        """Return the caller of a key's digest, or None if no keys exist.

        `digest` is '' if no key was sent.

        Raises:
            WrongKey: The key is unknown, revoked or missing.
        """
        cached = self._known.get(digest) or self._no_keys
        age_s = time.monotonic() - cached[0] if cached else LAST_S
        if cached and age_s < FRESH_S:
            return cached[1]
        asking = self._asking.get(digest)
        if asking is None:
            asking = asyncio.create_task(self._ask(digest))
            self._asking[digest] = asking
            asking.add_done_callback(lambda done: self._end_lookup(digest, done))
        if cached and age_s < LAST_S:
            return cached[1]
        return await asyncio.shield(asking)

    def _end_lookup(self, digest: str, task: asyncio.Task[Caller | None]) -> None:
        del self._asking[digest]
        if not task.cancelled():
            task.exception()  # or asyncio logs an error that no request waits for

    async def _ask(self, digest: str) -> Caller | None:
        began = time.monotonic()
        found: FoundKey = await self._lookup.put(digest)
        self._known.pop(digest, None)
        self._no_keys = None if found.any_keys else (began, None)
        if found.key is None:
            if found.any_keys:
                raise WrongKey(_WRONG if digest else _MISSING)
            return None
        if len(self._known) >= MOST_KEYS:
            self._known.clear()
        caller = Caller.of(found.key)
        self._known[digest] = (began, caller)
        return caller


class Auth:
    """Puts the caller and its key's digest into the scope, or answers 401."""

    def __init__(self, app: ASGIApp, lookup: KeyLookup, sessions: Sessions, host: str) -> None:
        self._app = app
        self._sessions = sessions
        self._callers = CallerCache(lookup)
        self._host = host
        self._loopback = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN and not is_asset(scope["path"]):
            headers: Headers = scope["warmq.headers"]
            try:
                digest = await self._digest(scope["path"], headers)
                caller = await self._callers.of(digest)
                if caller is None:
                    self._check_without_keys(scope, headers)
                    caller = Caller(operator=True)
            except (ApiError, WarmqError) as error:
                if isinstance(error, WrongKey) and scope["path"] == LOGIN:
                    await self._app(scope, receive, send)
                elif isinstance(error, WrongKey) and not error.no_keys and is_page(scope["path"]):
                    await to_login(scope, receive, send)
                else:
                    answer = api_error(error)
                    page = is_page(scope["path"]) and scope["path"] != LIVE
                    await (refuse_page if page else send_error)(scope, receive, send, answer)
                return
            scope["warmq.caller"] = caller
            scope["warmq.key_digest"] = digest if caller.key_id else ""
        await self._app(scope, receive, send)

    async def _digest(self, path: str, headers: Headers) -> str:
        """Return the digest of a request's key, or ''.

        Only the page accepts a cookie: browsers also send it with requests of other sites' pages.
        """
        if is_page(path):
            token = token_in(headers)
            return await self._sessions.key_digest(token) if token else ""
        key = key_in(headers)
        return digest_of(key) if key else ""

    def _check_without_keys(self, scope: Scope, headers: Headers) -> None:
        """Raise WrongKey unless a request comes from a program on this machine.

        Requests of other sites' pages in a browser are refused. Such a page can send requests to
        this machine, and read the answers if its own name resolves to this machine (DNS rebinding).
        """
        client = scope.get("client")
        local = self._loopback and client is not None and is_loopback(client[0])
        if not local:
            raise _not_local("this request came from another machine")
        if sign := sign_of_a_proxy(headers, scope.get("http_version", "1.1")):
            raise _not_local(f"this request seems to come through a proxy ({sign})")
        host = urlsplit("//" + headers.get(b"host", b"").decode("latin-1")).hostname or ""
        origin = headers.get(b"origin")
        from_page = not _local_origin(origin) if origin else _from_another_site(scope, headers)
        if from_page or not (_local_name(host) or host == self._host):
            raise WrongKey(
                "this gateway has no API keys, so it answers only under its own machine's names, "
                "for example 127.0.0.1, and no other site's pages; create a key with "
                "`producer keys create`",
                no_keys=True,
            )


def _not_local(why: str) -> WrongKey:
    return WrongKey(
        "this gateway has no API keys, so it answers only programs on its own machine, and "
        f"{why}; create a key there with `producer keys create --tenant NAME`, and send it",
        no_keys=True,
    )


@lru_cache(maxsize=64)  # a client sends the same headers each time
def _proxy_header(names: tuple[bytes, ...]) -> str:
    """Return the name of the first of these headers that a proxy adds, or ''."""
    of_proxies = (
        name for name in names if name in _PROXY_HEADERS or name.startswith(_PROXY_PREFIXES)
    )
    return next(of_proxies, b"").decode("latin-1")


def sign_of_a_proxy(headers: Headers, http_version: str) -> str:
    """Return the sign of a proxy: a header's name, HTTP/1.0 or HTTP/0.9; or ''.

    nginx before 1.29.7 sends HTTP/1.0 unless it is configured otherwise.
    """
    old = f"HTTP/{http_version}" if http_version in ("1.0", "0.9") else ""
    return _proxy_header(tuple(headers)) or old


def _from_another_site(scope: Scope, headers: Headers) -> bool:
    """Return whether a browser sends this request, without Origin, for another site's page.

    A link that the user follows is allowed: the other page cannot read the answer.
    """
    if headers.get(b"sec-fetch-site") != b"cross-site":
        return False
    opened = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
    return scope["method"] not in ("GET", "HEAD") or opened != (b"navigate", b"document")


def _local_origin(origin: bytes) -> bool:
    return _local_name(urlsplit(origin.decode("latin-1")).hostname or "")


def key_in(headers: Headers) -> bytes:
    """Return a request's key, or ''; raise ApiError (400) for two different keys."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    other = headers.get(b"x-api-key", b"")
    if bearer and other and bearer != other:
        message = "the request has two different keys, in Authorization and in x-api-key; send one"
        raise invalid(message, code="invalid_header")
    return bearer or other


def _local_name(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
