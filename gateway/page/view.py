"""Handles one request of the page at /ui: its session, language, form and response."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import shlex
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from contract.errors import WarmqError
from contract.naming import DEFAULT_TENANT
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, api_error
from gateway.http.services import Services
from gateway.page.rendering import HEADERS, LANGUAGES, language_of, render

COOKIE = "warmq_session"
LOGIN, LIVE = "/ui/login", "/ui/live"
THEMES = ("auto", "light", "dark")
#: Seconds for which a chosen language or theme is kept.
_CHOICE_S = 365 * 24 * 3600
#: Seconds of a session without a key, which only shows that a form comes from this browser.
_ANONYMOUS_S = 24 * 3600
_MAX_FORM_FIELDS = 2000
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
Headers = Mapping[bytes, bytes]


def is_page(path: str) -> bool:
    """Return whether a path belongs to the page, where a cookie identifies the caller."""
    return path == "/ui" or path.startswith("/ui/")


def is_asset(path: str) -> bool:
    """Return whether a path is a style's, script's or picture's, which need no Redis."""
    return path.startswith("/ui/assets/")


def new_token() -> str:
    """Return a new session token of 256 random bits."""
    return secrets.token_urlsafe(32)


def token_in(headers: Headers) -> str:
    """Return the session token in a request's cookies, '' without a valid one."""
    for pair in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == COOKIE and _TOKEN.fullmatch(value):
            return value
    return ""


def csrf_of(token: str) -> str:
    """Return the value that each form of a session sends, which other sites cannot know."""
    return hashlib.sha256(f"csrf\0{token}".encode()).hexdigest()[:40]


def set_cookie(response: Response, headers: Headers, token: str, life_s: int) -> None:
    """Set the session cookie; a life of 0 removes it."""
    secure = headers.get(b"x-forwarded-proto", b"").startswith(b"https")
    response.set_cookie(
        COOKIE, token, max_age=life_s, path="/ui", httponly=True, samesite="lax", secure=secure
    )


class View:
    """One request of the page; `form` has the last value of each form field."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.services: Services = request.app.state.services
        self.caller: Caller = request.scope["warmq.caller"]
        self.query = request.query_params
        self.form: dict[str, str] = {}
        self.form_list: list[tuple[str, str]] = []
        self.headers: Headers = request.scope["warmq.headers"]
        token = token_in(self.headers)
        self._new_session = not token
        self.token = token or new_token()
        accepted = language_of(request.headers.get("accept-language", ""))
        self.language = self._choice("lang", tuple(LANGUAGES), accepted)
        self.theme = self._choice("theme", THEMES, "auto")

    def _choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        for value in (self.query.get(name), self.request.cookies.get(f"warmq_{name}")):
            if value in choices:
                return str(value)
        return default

    async def read_form(self) -> None:
        """Read a POST's fields; raise ApiError for too many, or another session's."""
        text = (await self.request.body()).decode(errors="replace")
        try:
            self.form_list = parse_qsl(text, max_num_fields=_MAX_FORM_FIELDS)
        except ValueError:
            raise ApiError(400, "the form has too many fields; choose fewer") from None
        self.form = dict(self.form_list)
        self.check_form(self.form.get("csrf", ""))

    def check_form(self, sent: str) -> None:
        """Raise ApiError (403) unless a page of this session sent the form.

        This checks the value of `csrf_of`, and the browser's Sec-Fetch-Site, which proxies do not
        change; without that header it compares Origin with Host.
        """
        site = self.headers.get(b"sec-fetch-site")
        if site is not None:
            foreign = site not in (b"same-origin", b"none")
        else:
            origin = self.headers.get(b"origin", b"").decode("latin-1")
            host = self.headers.get(b"host", b"").decode("latin-1")
            foreign = bool(origin) and urlsplit(origin).netloc != host
        same = hmac.compare_digest(csrf_of(self.token).encode(), sent.encode())
        if foreign or self._new_session or not same:
            raise ApiError(
                403, "this form is not from your session; reload the page and send it again",
                code="csrf",
            )  # fmt: skip

    @property
    def tenant_option(self) -> str:
        """The option by which a shown command submits what the caller will see on the page."""
        tenant = self.caller.only_tenant
        return f" --tenant {shlex.quote(tenant)}" if tenant not in ("", DEFAULT_TENANT) else ""

    def page(self, template: str, status: int = 200, **context: object) -> Response:
        """Return a rendered page."""
        path = self.request.url.path
        one_time = ("lang", "theme", "notice", "n")
        kept = [(k, v) for k, v in self.query.multi_items() if k not in one_time]
        html = render(
            template,
            self.language,
            theme=self.theme,
            languages=LANGUAGES,
            path=path,
            choose=lambda **change: f"{path}?{urlencode([*kept, *change.items()])}",
            csrf=csrf_of(self.token),
            caller=self.caller,
            tenant_option=self.tenant_option,
            logged_in=bool(self.caller.key_id),
            notice=self.query.get("notice", ""),
            notice_n=self.query.get("n", ""),
            **context,
        )
        return self._with_cookies(HTMLResponse(html, status, HEADERS))

    def redirect(
        self, path: str, background: BackgroundTask | None = None, **query: object
    ) -> Response:
        """Redirect the browser to another page, after a write."""
        url = path + (f"?{urlencode(query)}" if query else "")
        return self._with_cookies(RedirectResponse(url, 303, HEADERS, background))

    def _with_cookies(self, response: Response) -> Response:
        for name, chosen in (("lang", self.language), ("theme", self.theme)):
            if self.query.get(name) == chosen:
                response.set_cookie(
                    f"warmq_{name}", chosen, max_age=_CHOICE_S, path="/ui", samesite="lax",
                    httponly=True,
                )  # fmt: skip
        if self._new_session:
            set_cookie(response, self.headers, self.token, _ANONYMOUS_S)
        return response

    def error_page(self, error: ApiError) -> Response:
        """Return the page for an error."""
        response = self.page("error.html", error.status, error=error)
        response.headers.update(error.headers)
        return response


async def refuse_page(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """Send the page for an error, outside of any route."""
    await View(Request(scope)).error_page(error)(scope, receive, send)


async def to_login(scope: Scope, receive: Receive, send: Send) -> None:
    """Redirect a browser to the login, which leads back to the requested page."""
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
Runner = Callable[..., Awaitable[Response]]


def answers(work: Callable[[View], Awaitable[Response]]) -> Endpoint:
    """Return an endpoint that shows the page for an error if `work` raises one."""

    async def endpoint(request: Request) -> Response:
        view = View(request)
        try:
            return await work(view)
        except (ApiError, WarmqError) as error:
            return view.error_page(api_error(error))

    return endpoint


def shows(handler: Callable[..., Response], run: Runner = run_in_threadpool) -> Endpoint:
    """Return a page's endpoint; the handler reads Redis, so it runs in a thread."""
    return answers(lambda view: run(handler, view))


def writes(handler: Callable[..., Response], run: Runner = run_in_threadpool) -> Endpoint:
    """Return the endpoint of a form; only forms of this session reach its handler."""

    async def written(view: View) -> Response:
        await view.read_form()
        return await run(handler, view)

    return answers(written)
