"""What servers, and what stands before them, answer although nothing is wrong with the request."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
from kit.servers.simulated_server import Json, Reply, answer, nginx, page

Bad = Callable[[str, Json], Reply]


def _always(reply: Reply) -> Bad:
    return lambda _path, _body: reply


def _error(message: str, **fields: object) -> Json:
    return {"error": {"message": message, **fields}}


def _answered_with(body: Json, words: bytes, instead: bytes) -> Reply:
    pieces = answer(body).pieces
    return Reply(200, tuple((at, (piece or b"").replace(words, instead)) for at, piece in pieces))


#: Answers of a server that is to be left alone for a while, by name; each to every request.
BAD: dict[str, Bad] = {
    "404 of an ingress": _always(page(404, b"404 page not found\n")),
    "404 of Kong": _always(page(404, {"message": "no Route matched with those values"})),
    "404 as a page": _always(nginx(404, "Not Found")),
    "404 in FastAPI's words": _always(page(404, {"detail": "Not Found"})),
    "404 of a model": _always(page(404, _error("The model `stub` does not exist.", code=404))),
    "405": _always(nginx(405, "Not Allowed")),
    "502": _always(nginx(502, "Bad Gateway")),
    "500 in words": _always(page(500, _error("Internal server error"))),
    "503": _always(nginx(503, "Service Temporarily Unavailable")),
    "503 without words": _always(page(503, b"")),
    "504": _always(nginx(504, "Gateway Time-out")),
    "524": _always(page(524, b"error code: 524")),
    "529": _always(page(529, {"type": "error", **_error("Overloaded", type="overloaded_error")})),
    "402": _always(page(402, _error("Insufficient Balance", type="unknown_error"))),
    "401": _always(page(401, _error("Invalid API key", code="invalid_api_key"))),
    "403": _always(nginx(403, "Forbidden")),
    "400 as a page": _always(nginx(400, "Bad Request")),
    "413 as a page": _always(nginx(413, "Request Entity Too Large")),
    "307": _always(page(307, b"", Location="https://login.example/v1/chat/completions?x=1")),
    "308": _always(page(308, b"", Location="/elsewhere")),
    "a page": _always(page(200, b"<html><body>Down for maintenance</body></html>")),
    "nothing": _always(page(200, b"")),
    "200 with an error": _always(page(200, _error("Provider returned error", code=502))),
    "200 with a rate limit": _always(page(200, _error("Rate limit exceeded", code=429))),
    "200 with a rate limit by name": _always(
        page(200, _error("slow down", code="rate_limit_exceeded"))
    ),
    "200 with LM Studio's words": _always(page(200, {"error": "Unexpected endpoint or method."})),
    "429": _always(page(429, _error("slow down"))),
    "429 that says when": _always(page(429, _error("slow down"), **{"Retry-After": "2"})),
    "429 that says now": _always(page(429, _error("slow down"), **{"Retry-After": "0"})),
    "400 with a rate limit in words": _always(
        page(400, _error("ThrottlingException: Too many requests, please wait"))
    ),
    "403 with an empty account": _always(page(403, _error("You exceeded your current quota"))),
    "cut": _always(Reply(200, ((0.0, b'data: {"choices": []}\n\n'), (0.1, None)))),
    "ends early": _always(Reply(200, ((0.1, b"data: [DONE]\n\n"),))),
    "an error in the stream": _always(
        Reply(200, ((0.1, b'data: {"error": {"message": "upstream died", "code": 502}}\n\n'),))
    ),
    "no choices": _always(page(200, {"choices": [], "usage": None})),
    "an end that is none": lambda _, body: _answered_with(body, b'"stop"', b'"error"'),
    "an answer without its end": lambda _, body: _answered_with(body, b'"stop"', b"null"),
    "a proxy's words as an event": _always(
        Reply(200, ((0.1, b"data: upstream connect error\n\n"),))
    ),
    "an event of an error": _always(
        Reply(200, ((0.1, b"event: error\ndata: the shard caught fire\n\n"),))
    ),
    "JSON that is no object": _always(page(200, b'["no"]')),
    "silence": lambda _, __: Reply(200, ((7200.0, b""),)),
    "comments only": lambda _, __: Reply(200, tuple((0.5, b": PROCESSING\n\n") for _ in range(20))),
}


def _refused() -> Reply:
    raise aiohttp.ClientConnectionError("connection refused")


#: What befalls the list of models as well as requests.
OF_THE_WHOLE: dict[str, Callable[[], Reply]] = {
    "404 of everything": lambda: page(404, b"404 page not found\n"),
    "502 of everything": lambda: nginx(502, "Bad Gateway"),
    "503 of everything": lambda: nginx(503, "Service Temporarily Unavailable"),
    "401 of everything": lambda: page(401, _error("Invalid API key")),
    "307 of everything": lambda: page(307, b"", Location="https://login.example/"),
    "a page of everything": lambda: page(200, b"<html><title>Sorry</title></html>"),
    "no connection": _refused,
}
