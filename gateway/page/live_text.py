"""Reads the text of one request while its worker writes and publishes it."""

from __future__ import annotations

import logging
import time

from starlette.concurrency import run_in_threadpool

from contract import naming
from contract.errors import WarmqError
from contract.results import outcome_of, read_meta
from contract.streaming import Listener
from gateway.batches.api import batches as api
from gateway.batches.api.protocol import part_ids
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.http.services import Services

log = logging.getLogger(__name__)

#: Seconds between two checks of a request's end.
CHECK_S = 2.0
#: State of a request's text as the browser gets it: attempt, text, outcome ('' while it runs).
Text = tuple[int, str, str]


class LiveText:
    """Reads the text of one request while its worker writes and publishes it."""

    def __init__(self, services: Services, caller: Caller, batch_id: str, custom_id: str) -> None:
        self._services, self._caller = services, caller
        self._batch_id, self._custom_id = batch_id, custom_id
        self._listener: Listener | None = None
        self._subscribed_at = self._checked_at = 0.0
        self._sent = (0, "", "")

    def subscribe(self) -> None:
        """Subscribe to the request in each queue batch of its batch, if these are known.

        Raises ApiError (404) if the caller has no such batch.
        """
        self._subscribed_at = time.monotonic()
        batch_view = api.view_of(self._services, self._caller, self._batch_id)
        ids = [naming.request_id(part, self._custom_id) for part in part_ids(batch_view)]
        self._listener = self._services.batches.listener(*ids) if ids else None

    async def changed(self) -> Text | None:
        """Return the whole text, if it has changed; None otherwise."""
        try:
            text = await run_in_threadpool(self._read)
        except (WarmqError, ApiError):
            return None  # other events of the stream report this
        except Exception:
            log.exception("the text of a request cannot be read", extra={"action": "no_pages"})
            return None
        if text == self._sent:
            return None
        self._sent = text
        return text

    def _read(self) -> Text:
        if self._listener is None and time.monotonic() - self._subscribed_at > CHECK_S:
            self.subscribe()
        if self._listener is None:
            return self._sent
        self._listener.read(0)
        self._check_end(self._listener)
        transcripts = self._listener.transcripts.values()
        latest = max(transcripts, key=lambda t: (t.attempt, bool(t.ended), len(t.texts.get(0, ""))))
        return latest.attempt, latest.texts.get(0, ""), latest.ended

    def _check_end(self, listener: Listener) -> None:
        """Look up results every CHECK_S: each is published once, and may have been missed."""
        texts, now = listener.transcripts, time.monotonic()
        if now - self._checked_at < CHECK_S or any(text.ended for text in texts.values()):
            return
        self._checked_at = now
        for text, raw in zip(texts.values(), self._services.batches.results([*texts]), strict=True):
            if raw is not None:
                text.ended = outcome_of(read_meta(raw))

    def close(self) -> None:
        """End the subscription."""
        if self._listener is not None:
            self._listener.close()
