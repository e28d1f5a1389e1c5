"""The cookie that stands for a key at the page, and what keeps other sites' forms out."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from gateway.http.errors import ApiError

COOKIE = "warmq_session"
LOGIN, LIVE = "/ui/login", "/ui/live"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
Headers = Mapping[bytes, bytes]


def is_page(path: str) -> bool:
    """Whether a path is one of the page's, where a cookie says who calls and no key is read."""
    return path == "/ui" or path.startswith("/ui/")


def is_open_page(path: str) -> bool:
    """Whether a path of the page needs nobody to be logged in."""
    return path == LOGIN or is_asset(path)


def is_asset(path: str) -> bool:
    """Whether a path is that of a style, script or picture: they are there without Redis, too."""
    return path.startswith("/ui/assets/")


def new_token() -> str:
    """Return a fresh token, of 256 random bits."""
    return secrets.token_urlsafe(32)


def token_in(headers: Headers) -> str:
    """Return the session's token that a request carries, '' if none that could be one."""
    for pair in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == COOKIE and _TOKEN.fullmatch(value):
            return value
    return ""


def csrf_of(token: str) -> str:
    """Return what each form of a session has to send: no other site can know it."""
    return hashlib.sha256(f"csrf\0{token}".encode()).hexdigest()[:40]


def check_form(headers: Headers, token: str, sent: str) -> None:
    """Raise ApiError unless a write comes from a page of this session.

    The browser's own word is asked too, where it gives it: Sec-Fetch-Site, which no proxy changes,
    else Origin beside Host.
    """
    site = headers.get(b"sec-fetch-site")
    origin = headers.get(b"origin", b"").decode("latin-1")
    host = headers.get(b"host", b"").decode("latin-1")
    foreign = bool(origin) and urlsplit(origin).netloc != host
    if site is not None:
        foreign = site not in (b"same-origin", b"none")
    if foreign or not token or not hmac.compare_digest(csrf_of(token), sent):
        raise ApiError(
            403, "this form is not of your session: open the page anew, and send it again",
            code="csrf",
        )  # fmt: skip


def set_cookie(response: Response, headers: Headers, token: str, life_s: int) -> None:
    """Give the browser a session; with no token take it."""
    secure = headers.get(b"x-forwarded-proto", b"").startswith(b"https")
    response.set_cookie(
        COOKIE, token, max_age=life_s if token else 0, path="/ui", httponly=True,
        samesite="lax", secure=secure,
    )  # fmt: skip


async def to_login(scope: Scope, receive: Receive, send: Send) -> None:
    """Send a browser to the login, and from there back to where it wanted to be."""
    response: Response
    if scope["method"] == "GET" and scope["path"] != LIVE:
        query = scope.get("query_string", b"").decode("latin-1")
        back = scope["path"] + (f"?{query}" if query else "")
        response = RedirectResponse(f"{LOGIN}?next={quote(back, safe='')}", 303)
    else:
        response = Response("not logged in; open /ui/login\n", 401, media_type="text/plain")
    response.headers["cache-control"] = "no-store"
    await response(scope, receive, send)
