"""Routes of the page, its login and logout.

A login exchanges a key for a session cookie, so that the browser does not keep the key.
"""

from __future__ import annotations

from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gateway.page import (
    batch_list,
    batches,
    dead_letters,
    file_reading,
    fleet,
    live,
    one_request,
    retrying,
    submit,
)
from gateway.page.rendering import ASSETS, HEADERS, VERSION
from gateway.page.view import LIVE, LOGIN, View, answers, new_token, set_cookie, shows, writes
from gateway.redis.api_keys import LIFE_S, digest_of


def _safe_next(path: str) -> str:
    """Return the path to open after a login: one of the page's own, else `/ui`."""
    inside = path == "/ui" or path.startswith(("/ui/", "/ui?"))
    return path if inside and path.isprintable() and "\\" not in path else "/ui"


async def _login(view: View) -> Response:
    """Show the login form, or start a session for the key that was sent."""
    services = view.services
    if not await run_in_threadpool(services.keys.any):
        return view.redirect("/ui")
    if view.request.method != "POST":
        return view.page("login.html", back=_safe_next(view.query.get("next", "")), wrong=False)
    await view.read_form()
    back = _safe_next(view.form.get("next", ""))
    digest = digest_of(view.form.get("key", "").strip())
    (lookup,) = await services.lookup.find([digest])
    if lookup.key is None:
        return view.page("login.html", 401, back=back, wrong=True)
    token = new_token()
    await services.sessions.begin(token, digest)
    response = view.redirect(back)
    set_cookie(response, view.headers, token, LIFE_S)
    return response


async def _logout(view: View) -> Response:
    await view.read_form()
    await view.services.sessions.end(view.token)
    response = view.redirect(LOGIN)
    set_cookie(response, view.headers, "", 0)
    return response


async def _asset(request: Request) -> Response:
    asset = ASSETS.get(request.path_params["name"])
    if asset is None:
        return Response(status_code=404, headers=HEADERS)
    media, content = asset
    current = request.path_params["version"] == VERSION
    cache_control = "public, max-age=31536000, immutable" if current else "no-cache"
    return Response(content, headers=HEADERS | {"cache-control": cache_control}, media_type=media)


async def _without_slash(request: Request) -> Response:
    """Redirect to the path without the slashes at its end."""
    path, query = quote(request.scope["path"].rstrip("/")), request.url.query
    return RedirectResponse(f"{path}?{query}" if query else path, headers=HEADERS)


def routes() -> list[Route]:
    """Return the routes."""
    one = "/ui/batches/{batch_id}"
    return [
        Route("/ui", shows(fleet.overview)),
        Route(LOGIN, answers(_login), methods=["GET", "POST"]),
        Route("/ui/logout", answers(_logout), methods=["POST"]),
        Route("/ui/assets/{version}/{name}", _asset),
        Route("/ui/workers", shows(fleet.workers)),
        Route("/ui/batches", shows(batch_list.batches)),
        Route(one, shows(batches.batch)),
        Route(f"{one}/request", shows(one_request.request, one_request.one_at_a_time)),
        Route(f"{one}/download/{{kind}}", shows(batches.download)),
        Route(f"{one}/retry", writes(retrying.retry, file_reading.one_at_a_time), methods=["POST"]),
        Route(f"{one}/cancel", writes(batches.cancel), methods=["POST"]),
        Route("/ui/tenants", shows(fleet.tenants)),
        Route("/ui/dead", shows(dead_letters.show)),
        Route("/ui/dead", writes(dead_letters.retry_or_delete), methods=["POST"]),
        Route("/ui/submit", shows(submit.submit, submit.one_at_a_time)),
        Route("/ui/submit", answers(submit.upload), methods=["POST"]),
        Route(
            "/ui/submit/start", writes(submit.start, file_reading.one_at_a_time), methods=["POST"]
        ),
        Route("/ui/submit/try", writes(submit.trial, file_reading.one_at_a_time), methods=["POST"]),
        Route(LIVE, live.live),
        Route("/ui/", _without_slash),
        Route("/ui/{path:path}/", _without_slash),
    ]
