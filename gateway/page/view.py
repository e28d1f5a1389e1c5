"""What a page is made with: who looks, in which language, and the answer around its content."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl, urlencode

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from contract.errors import WarmqError
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, of_warmq
from gateway.http.page_session import check_form, csrf_of, new_token, set_cookie, token_in
from gateway.http.services import Services
from gateway.page.rendering import HEADERS, render
from gateway.page.words import LANGUAGES, language_of

THEMES = ("auto", "light", "dark")
#: A choice of language or theme is kept for a year.
_KEPT_S = 365 * 24 * 3600
#: Fields of a form; each is short.
_MOST_FIELDS = 2000


class View:
    """One request of a page. `form` has the fields of a POST, each value the last of its name."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.services: Services = request.app.state.services
        self.caller: Caller = request.scope["warmq.caller"]
        self.query = request.query_params
        self.form: dict[str, str] = {}
        self.form_list: list[tuple[str, str]] = []
        headers = request.scope["warmq.headers"]
        self.token = token_in(headers)
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
        for name in ("lang", "theme"):
            if name in self.query and self.query[name] == getattr(
                self, "language" if name == "lang" else name
            ):
                response.set_cookie(
                    f"warmq_{name}", self.query[name], max_age=_KEPT_S, path="/ui",
                    samesite="lax", httponly=True,
                )  # fmt: skip
        if self._fresh:  # a session of nobody: it only ties forms to this browser
            set_cookie(response, self.request.scope["warmq.headers"], self.token, 24 * 3600)
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


Handler = Callable[..., Response]
#: Calls the first function with the second one and the view, in a thread.
Within = Callable[..., Awaitable[Response]]


def shows(
    handler: Handler, within: Within = run_in_threadpool
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a page; it is made in a thread, for it reads Redis."""

    @functools.wraps(handler)
    async def endpoint(request: Request) -> Response:
        return await within(_made, handler, View(request))

    return endpoint


def writes(
    handler: Handler, within: Within = run_in_threadpool
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a form: only one of this session's own pages reaches its handler."""

    @functools.wraps(handler)
    async def endpoint(request: Request) -> Response:
        view = View(request)
        try:
            view.form_list = parse_qsl(
                (await request.body()).decode(errors="replace"), max_num_fields=_MOST_FIELDS
            )
            view.form = dict(view.form_list)
            token = token_in(request.scope["warmq.headers"])
            check_form(request.scope["warmq.headers"], token, view.form.get("csrf", ""))
        except ValueError:
            return view.failed(ApiError(400, "the form has too many fields; choose fewer"))
        except ApiError as error:
            return view.failed(error)
        return await within(_made, handler, view)

    return endpoint


def _made(handler: Handler, view: View) -> Response:
    try:
        return handler(view)
    except ApiError as error:
        return view.failed(error)
    except WarmqError as error:
        return view.failed(of_warmq(error))
