"""Reads whether the webhook of a batch (`submit --notify`) was delivered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from contract.batch import Batch
from contract.redis import keys
from contract.redis.reads import Reads

State = Literal["waiting", "due", "delivered", "given_up"]


@dataclass(frozen=True, slots=True)
class WebhookState:
    """A batch's webhook when it was read; times are in ms since 1970, by Redis's clock.

    `state` is `waiting` until the batch ends, then `due` until it was `delivered` or `given_up`.
    `problem` is why the last try failed.
    """

    url: str
    state: State
    tried_ms: str | None = None
    problem: str | None = None
    next_try_ms: str | None = None


class WebhookReads(Reads):
    """Reads the states of webhooks. Raises StoreUnavailable."""

    def state(self, batch: Batch) -> WebhookState | None:
        """Return the state of a batch's webhook; None if its submit asked for none."""
        url = batch.fields.get("notify")
        if not url:
            return None
        # The due time is read first: a script that ends the tries removes it and writes `notified`.
        due = self._client.zscore(keys.NOTIFY, batch.id)
        values = self._client.hmget(keys.batch_key(batch.id), "finished_at", "notified")
        finished_at, notified = (value.decode() if value else "" for value in values)
        if not finished_at:
            return WebhookState(url, "waiting")
        end_ms, tried_ms, problem = notified.split(" ", 2) if notified else ("", "", "")
        if end_ms != finished_at:  # `notified` is about an earlier end, before a retry
            tried_ms = problem = ""
        next_ms = None if due is None else str(int(due))
        state: State = "due" if next_ms else "given_up" if problem else "delivered"
        return WebhookState(url, state, tried_ms or None, problem or None, next_ms)
