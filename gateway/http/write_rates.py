"""Calls that write have a rate: POST and DELETE of whatever is no online request."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.errors import StoreUnavailable
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, of_warmq
from gateway.http.idempotency import ATTACHING
from gateway.http.limits import Limits
from gateway.http.refusal import refuse

_WRITES = frozenset(("POST", "DELETE", "PUT", "PATCH"))


class WriteRates:
    """Takes each call that writes of its key's rate; online requests have rates of their own.

    What is refused under an Idempotency-Key is remembered, so a key's refusals have a rate, too.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] not in _WRITES:
            await self._app(scope, receive, send)
            return
        keyed = scope["method"] == "POST" and b"idempotency-key" in scope["warmq.headers"]
        online = scope["path"] in ATTACHING
        if online and not keyed:
            await self._app(scope, receive, send)
            return
        caller: Caller = scope["warmq.caller"]
        if not caller.key_id and scope["path"].startswith("/ui"):  # it may be a login
            await self._app(scope, receive, send)
            return
        try:
            if not online:
                await self._limits.check_write(caller)
            if keyed:
                await self._limits.check_refusals(caller)
        except ApiError as error:
            await refuse(scope, receive, send, error)
            return
        except StoreUnavailable as error:
            await refuse(scope, receive, send, of_warmq(error))
            return
        await self._app(scope, receive, self._watched(caller, scope, send) if keyed else send)

    def _watched(self, caller: Caller, scope: Scope, send: Send) -> Send:
        """Return a `send` that counts an answer which is a refusal."""

        async def sent(message: Message) -> None:
            stored = message["type"] == "http.response.start" and scope.get("warmq.remembered")
            if stored and _is_remembered(message["status"]):
                self._limits.note_refusal(caller)
            await send(message)

        return sent


def _is_remembered(status: int) -> bool:
    # 429 and 5xx are not (idempotency.py).
    return 400 <= status < 500 and status != 429
