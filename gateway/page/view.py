"""What a page is made with: who looks, in which language, and the answer around its content; the
cookie that stands for a key, and what keeps other sites' forms out."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from contract.errors import WarmqError
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, api_error
from gateway.http.services import Services
from gateway.page.rendering import HEADERS, LANGUAGES, language_of, render

COOKIE = "warmq_session"
LOGIN, LIVE = "/ui/login", "/ui/live"
THEMES = ("auto", "light", "dark")
#: A choice of language or theme is kept for a year.
_KEPT_S = 365 * 24 * 3600
#: Fields of a form; each is short.
_MOST_FIELDS = 2000
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
Headers = Mapping[bytes, bytes]


def is_page(path: str) -> bool:
    """Whether a path is one of the page's, where a cookie says who calls and no key is read."""
    return path == "/ui" or path.startswith("/ui/")


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


def set_cookie(response: Response, headers: Headers, token: str, life_s: int) -> None:
    """Give the browser a session; with no token take it."""
    secure = headers.get(b"x-forwarded-proto", b"").startswith(b"https")
    response.set_cookie(
        COOKIE, token, max_age=life_s if token else 0, path="/ui", httponly=True,
        samesite="lax", secure=secure,
    )  # fmt: skip


class View:
    """One request of a page. `form` has the fields of a POST, each value the last of its name."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.services: Services = request.app.state.services
        self.caller: Caller = request.scope["warmq.caller"]
        self.query = request.query_params
        self.form: dict[str, str] = {}
        self.form_list: list[tuple[str, str]] = []
        self.headers: Headers = request.scope["warmq.headers"]
        self.token = token_in(self.headers)
        self._fresh = not self.token
        if self._fresh:
            self.token = new_token()
        self.language = self._choice(
            "lang", tuple(LANGUAGES), language_of(request.headers.get("accept-language", ""))
        )
        self.theme = self._choice("theme", THEMES, "auto")

    def _choice(self, name: str, of: tuple[str, ...], default: str) -> str:
        for asked in (self.query.get(name), self.request.cookies.get(f"warmq_{name}")):
            if asked in of:
                return str(asked)
        return default

    async def read_form(self) -> None:
        """Read the fields of a POST.

        Raises:
            ApiError: there are too many, or no page of this session has sent them.
        """
        text = (await self.request.body()).decode(errors="replace")
        try:
            self.form_list = parse_qsl(text, max_num_fields=_MOST_FIELDS)
        except ValueError:
            raise ApiError(400, "the form has too many fields; choose fewer") from None
        self.form = dict(self.form_list)
        self.check_form(self.form.get("csrf", ""))

    def check_form(self, sent: str) -> None:
        """Raise ApiError unless a write comes from a page of this session.

        The browser's own word is asked too, where it gives it: Sec-Fetch-Site, which no proxy
        changes, else Origin beside Host.
        """
        site = self.headers.get(b"sec-fetch-site")
        origin = self.headers.get(b"origin", b"").decode("latin-1")
        host = self.headers.get(b"host", b"").decode("latin-1")
        foreign = bool(origin) and urlsplit(origin).netloc != host
        if site is not None:
            foreign = site not in (b"same-origin", b"none")
        mine = hmac.compare_digest(csrf_of(self.token).encode(), sent.encode())
        if foreign or self._fresh or not mine:
            raise ApiError(
                403, "this form is not of your session: open the page anew, and send it again",
                code="csrf",
            )  # fmt: skip

    def page(self, template: str, status: int = 200, **context: object) -> Response:
        """Return a whole page."""
        path = self.request.url.path
        kept = [
            (k, v) for k, v in self.query.multi_items() if k not in ("lang", "theme", "told", "n")
        ]
        html = render(
            template,
            self.language,
            theme=self.theme,
            themes=THEMES,
            languages=LANGUAGES,
            path=path,
            choose=lambda **change: f"{path}?{urlencode([*kept, *change.items()])}",
            csrf=csrf_of(self.token),
            caller=self.caller,
            logged_in=bool(self.caller.key_id),
            told=self.query.get("told", ""),
            told_n=self.query.get("n", ""),
            **context,
        )
        return self._finished(HTMLResponse(html, status, HEADERS))

    def to(self, path: str, background: BackgroundTask | None = None, **query: object) -> Response:
        """Send the browser to another page, after a write."""
        where = path + (f"?{urlencode(query)}" if query else "")
        return self._finished(RedirectResponse(where, 303, HEADERS, background))

    def _finished(self, response: Response) -> Response:
        for name, chosen in (("lang", self.language), ("theme", self.theme)):
            if self.query.get(name) == chosen:
                response.set_cookie(
                    f"warmq_{name}", chosen, max_age=_KEPT_S, path="/ui", samesite="lax",
                    httponly=True,
                )  # fmt: skip
        if self._fresh:  # a session of nobody: it only ties forms to this browser
            set_cookie(response, self.headers, self.token, 24 * 3600)
        return response

    def failed(self, error: ApiError) -> Response:
        """Return the page of an error."""
        response = self.page("error.html", error.status, error=error)
        response.headers.update(error.headers)
        return response


async def refuse_page(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """Answer an error as a page, before any route is reached: Redis is away, say."""
    response = View(Request(scope)).failed(error)
    await response(scope, receive, send)


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


Endpoint = Callable[[Request], Awaitable[Response]]
#: Calls a handler with a view, in a thread.
Within = Callable[..., Awaitable[Response]]


def answers(work: Callable[[View], Awaitable[Response]]) -> Endpoint:
    """Return the endpoint of a page; its answer to an error is the page that tells it."""

    async def endpoint(request: Request) -> Response:
        view = View(request)
        try:
            return await work(view)
        except (ApiError, WarmqError) as error:
            return view.failed(api_error(error))

    return endpoint


def shows(handler: Callable[..., Response], within: Within = run_in_threadpool) -> Endpoint:
    """Return the endpoint of a page; it is made in a thread, for it reads Redis."""

    async def shown(view: View) -> Response:
        return await within(handler, view)

    return answers(shown)


def writes(handler: Callable[..., Response], within: Within = run_in_threadpool) -> Endpoint:
    """Return the endpoint of a form: only one of this session's own pages reaches its handler."""

    async def written(view: View) -> Response:
        await view.read_form()
        return await within(handler, view)

    return answers(written)
