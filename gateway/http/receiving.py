"""Bodies that are read before their handler reads them."""

from __future__ import annotations

from starlette.types import Message, Receive


async def whole_body(receive: Receive) -> bytes | None:
    """Return a request's body; None if the client has gone before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` for a body that was read already."""
    kept: bytes | None = body
    del body

    async def replay() -> Message:
        nonlocal kept
        if kept is None:
            return await receive()
        given, kept = kept, None  # who has read it may drop it
        return {"type": "http.request", "body": given, "more_body": False}

    return replay
