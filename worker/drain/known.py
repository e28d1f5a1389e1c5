"""Makes the digests by which later requests find answers (WARMQ_KNOWN_ANSWERS)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Self

import orjson

from contract.errors import RequestRejected
from contract.known import answer_digest, body_hash, identity_of
from contract.message import Delivery
from contract.redis.known import KnownAnswer
from worker.drain.endings import Ending
from worker.engine import Capacity, EngineRequest
from worker.settings import WorkerSettings

#: The form of ids of a batch's requests; the script KNOW separates entries by spaces and newlines.
_REQUEST_ID = re.compile(r"[0-9a-f-]{36}")


class Offers:
    """The answers of one engine that may be reused: those of batches, and of known models."""

    def __init__(
        self, identity: Callable[[], str], most: int, fixed: str, models: Collection[str] | None
    ) -> None:
        """Prepare; `models` are the names that a request may have, None if any may be used.

        `fixed` is the part of the identity that the engine does not know.
        """
        self.most, self._models = most, models
        self._identity_of_engine, self._fixed = identity, fixed
        self._last = "", ""

    @property
    def identity(self) -> str:
        """The identity now; '' while it is unknown, then no answer is noted."""
        now = self._identity_of_engine()
        if now != self._last[0]:
            self._last = now, now and identity_of(self._fixed, now)
        return self._last[1]

    @classmethod
    def of(cls, settings: WorkerSettings, capacity: Capacity, served: str) -> Self | None:
        """Return the offers of an engine; None if answers are not noted, or it has no identity."""
        if not settings.known_answers or capacity.identity is None:
            return None
        # The files of an adapter that is loaded on demand may change while the engine runs.
        models = None
        if capacity.on_demand is not None:
            models = {served, *capacity.details.get("served_names", ())}
        fixed = f"{served} {settings.default_max_tokens}"
        return cls(capacity.identity, settings.known_answers, fixed, models)

    def hash_of(self, delivery: Delivery) -> int | None:
        """Return the hash of a delivery's body; None if its answer is not noted."""
        if not delivery.batch or not _REQUEST_ID.fullmatch(delivery.request_id):
            return None
        args = delivery.message.get("body")
        return body_hash(orjson.dumps(args)) if isinstance(args, str) else None

    def digest_of(self, request: EngineRequest) -> str:
        """Return the digest of a request's answer; '' if the answer may vary."""
        model, identity = request.body.get("model"), self.identity
        if not identity:
            return ""
        if self._models is not None and model and model not in self._models:
            return ""
        try:
            return answer_digest(identity, request.url, request.body)
        except RequestRejected:  # nested too deep; the engine has answered it nevertheless
            return ""


def known_of(endings: Sequence[Ending]) -> dict[str, list[KnownAnswer]]:
    """Return the known answers among endings, by tenant."""
    found: dict[str, list[KnownAnswer]] = {}
    for ending in endings:
        if ending.known is not None:
            digest, number = ending.known
            answer = KnownAnswer(digest, number, ending.delivery.request_id)
            found.setdefault(ending.delivery.tenant, []).append(answer)
    return found
