"""Logging in with a key, which the browser then does not hold; and out."""

from __future__ import annotations

from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from contract.errors import WarmqError
from gateway.http.errors import ApiError, of_warmq
from gateway.http.page_session import check_form, new_token, set_cookie, token_in
from gateway.page.view import View
from gateway.redis.api_keys import LIFE_S, digest_of


def _back(wanted: str) -> str:
    """Return where to go after a login: a path of the page, and nothing else."""
    inside = wanted == "/ui" or wanted.startswith(("/ui/", "/ui?"))
    return wanted if inside and wanted.isprintable() and "\\" not in wanted else "/ui"


async def login(request: Request) -> Response:
    """Ask for a key, and give a session for it."""
    view = View(request)
    back = _back(view.query.get("next", ""))
    services = view.services
    try:
        if not await run_in_threadpool(services.keys.any):
            return view.to("/ui")
        if request.method != "POST":
            return view.page("login.html", back=back, wrong=False)
        form = dict(parse_qsl((await request.body()).decode(errors="replace"), max_num_fields=20))
        headers = request.scope["warmq.headers"]
        check_form(headers, token_in(headers), form.get("csrf", ""))
        back = _back(form.get("next", ""))
        digest = digest_of(form.get("key", "").strip())
        (found,) = await services.lookup.find([digest])
        if found.key is None or found.key.revoked_at is not None:
            return view.page("login.html", 401, back=back, wrong=True)
        token = new_token()
        await services.sessions.begin(token, digest)
    except ApiError as error:
        return view.failed(error)
    except WarmqError as error:
        return view.failed(of_warmq(error))
    except ValueError:
        return view.failed(ApiError(400, "the form has too many fields"))
    response = view.to(back)
    set_cookie(response, headers, token, LIFE_S)
    return response


async def logout(request: Request) -> Response:
    """End the session."""
    view, headers = View(request), request.scope["warmq.headers"]
    token = token_in(headers)
    try:
        form = dict(parse_qsl((await request.body()).decode(errors="replace"), max_num_fields=20))
        check_form(headers, token, form.get("csrf", ""))
        await view.services.sessions.end(token)
    except ApiError as error:
        return view.failed(error)
    except WarmqError as error:
        return view.failed(of_warmq(error))
    except ValueError:
        return view.failed(ApiError(400, "the form has too many fields"))
    response = view.to("/ui/login")
    set_cookie(response, headers, "", 0)
    return response
