"""Bodies are bounded, and what no route can mean is refused, before anybody is asked who calls."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import ApiError
from gateway.http.refusal import refuse

#: Uploads count what they read against a limit of their own (gateway/files, batches/anthropic).
_UPLOADS = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts|/v1/messages/batches|/ui/submit")
#: A client reads no answer while it is still sending, and loses one if its connection is closed
#: with bytes of it unread. So much of a body that is too large is taken and dropped before the
#: answer, as a multiple of the limit; of a larger one nothing more.
DROPPED = 4


def takes_large(path: str) -> bool:
    """Whether what is posted there is read piece by piece, and may be larger than memory."""
    return _UPLOADS.fullmatch(path) is not None


class Bodies:
    """Answers 413 to bodies of more than `most` bytes, 404 to paths with control characters."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            if not scope["path"].isprintable():
                told = ApiError(404, "the path has control characters, as no route has")
                await refuse(scope, receive, send, told)
                return
            headers = scope["warmq.headers"]
            length = headers.get(b"content-length")
            if length is not None:
                if int(length) > self._most and not takes_large(scope["path"]):
                    close = int(length) > self._most * DROPPED
                    if not close and b"expect" not in headers:
                        await _drop(receive, int(length))
                    await refuse(scope, receive, send, self._too_large(), close=close)
                    return
            elif b"transfer-encoding" in headers and not takes_large(scope["path"]):
                await self._counted(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request whose length nobody has told."""
        size, more = 0, True

        async def count() -> Message:
            nonlocal size, more
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if size > self._most:
                raise self._too_large()  # in whoever reads; it becomes the answer
            return message

        async def end(message: Message) -> None:
            if size > self._most and message["type"] == "http.response.start":
                if more:
                    await _drop(receive, self._most * DROPPED - size)
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, count, end)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._most} bytes, the most that this gateway takes "
            "(WARMQ_GATEWAY_MAX_BODY_BYTES); send what is large as a file",
            code="request_too_large",
        )


async def _drop(receive: Receive, most: int) -> None:
    """Take the rest of a body, up to about so many bytes."""
    while most > 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            return
        most -= len(message["body"])
