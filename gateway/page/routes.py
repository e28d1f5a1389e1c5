"""Routes of the page; logging in with a key, which the browser then does not hold, and out."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.page import batch, batches, dead, fleet, live, requests, submit, whole_files
from gateway.page.rendering import ASSETS, HEADERS, VERSION
from gateway.page.view import LIVE, LOGIN, View, answers, new_token, set_cookie, shows, writes
from gateway.redis.api_keys import LIFE_S, digest_of


def _back(wanted: str) -> str:
    """Return where to go after a login: a path of the page, and nothing else."""
    inside = wanted == "/ui" or wanted.startswith(("/ui/", "/ui?"))
    return wanted if inside and wanted.isprintable() and "\\" not in wanted else "/ui"


async def _login(view: View) -> Response:
    """Ask for a key, and give a session for it."""
    services = view.services
    if not await run_in_threadpool(services.keys.any):
        return view.to("/ui")
    if view.request.method != "POST":
        return view.page("login.html", back=_back(view.query.get("next", "")), wrong=False)
    await view.read_form()
    back = _back(view.form.get("next", ""))
    digest = digest_of(view.form.get("key", "").strip())
    (found,) = await services.lookup.find([digest])
    if found.key is None:
        return view.page("login.html", 401, back=back, wrong=True)
    token = new_token()
    await services.sessions.begin(token, digest)
    response = view.to(back)
    set_cookie(response, view.headers, token, LIFE_S)
    return response


async def _logout(view: View) -> Response:
    """End the session."""
    await view.read_form()
    await view.services.sessions.end(view.token)
    response = view.to(LOGIN)
    set_cookie(response, view.headers, "", 0)
    return response


async def _asset(request: Request) -> Response:
    found = ASSETS.get(request.path_params["name"])
    if found is None:
        return Response(status_code=404, headers=HEADERS)
    media, content = found
    fresh = request.path_params["version"] == VERSION
    kept = "public, max-age=31536000, immutable" if fresh else "no-cache"
    return Response(content, headers=HEADERS | {"cache-control": kept}, media_type=media)


def routes() -> list[Route]:
    """Return the routes."""
    one = "/ui/batches/{batch_id}"
    retry = writes(batch.retry, whole_files.in_turn)
    return [
        Route("/ui", shows(fleet.overview), methods=["GET"]),
        Route(LOGIN, answers(_login), methods=["GET", "POST"]),
        Route("/ui/logout", answers(_logout), methods=["POST"]),
        Route("/ui/assets/{version}/{name}", _asset, methods=["GET"]),
        Route("/ui/workers", shows(fleet.workers), methods=["GET"]),
        Route("/ui/batches", shows(batches.batches), methods=["GET"]),
        Route(one, shows(batch.batch), methods=["GET"]),
        Route(f"{one}/request", shows(requests.request), methods=["GET"]),
        Route(f"{one}/download/{{kind}}", shows(batch.download), methods=["GET"]),
        Route(f"{one}/retry", retry, methods=["POST"]),
        Route(f"{one}/cancel", writes(batch.cancel), methods=["POST"]),
        Route("/ui/tenants", shows(fleet.tenants), methods=["GET"]),
        Route("/ui/dead", shows(dead.dead), methods=["GET"]),
        Route("/ui/dead", writes(dead.change), methods=["POST"]),
        Route("/ui/submit", shows(submit.submit, submit.in_turn), methods=["GET"]),
        Route("/ui/submit", answers(submit.upload), methods=["POST"]),
        Route("/ui/submit/start", writes(submit.start), methods=["POST"]),
        Route(LIVE, live.live, methods=["GET"]),
    ]
