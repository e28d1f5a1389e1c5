"""Stores webhooks, and the endpoints of tenants: URLs to which webhooks are posted.

A `Delivery` is one webhook: the end of one batch, for one endpoint.
"""

from __future__ import annotations

import hashlib
import secrets
import time

import msgspec

from contract.redis.reads import Reads
from contract.webhooks import new_secret

#: The hash in Redis: endpoint id -> record (JSON).
ENDPOINTS = "warmq:gateway:webhooks"
#: The events: `batch.<final status>`.
EVENTS = ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled")
#: Seconds for which a webhook is tried. It is stored for a day more, so that it is not repeated.
TRIED_S = 3 * 86400
_REMEMBERED_S = TRIED_S + 86400


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A URL to which a tenant's events are posted, signed with the secret."""

    id: str
    tenant: str
    url: str
    events: tuple[str, ...]
    secret: str
    created_at: int  # s since 1970

    def __repr__(self) -> str:
        """Leave out the secret, and the URL, which may contain a secret."""
        return f"Endpoint({self.id}, {self.tenant})"


class Delivery(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One webhook: an event for one endpoint. `created_at`: the batch's end, s since 1970."""

    id: str
    endpoint_id: str
    batch_id: str
    event: str
    created_at: int
    tries: int = 0
    ended: bool = False


_endpoint = msgspec.json.Decoder(Endpoint).decode
_delivery = msgspec.json.Decoder(Delivery).decode
_encode = msgspec.json.Encoder().encode


def delivery_id(batch_id: str, endpoint_id: str, event: str) -> str:
    """Return the id of a webhook, the same whenever its event is noted."""
    name = f"{batch_id}\0{endpoint_id}\0{event}"
    return "wh_" + hashlib.sha256(name.encode()).hexdigest()[:32]


class Webhooks(Reads):
    """Stores endpoints and webhooks. Calls raise StoreUnavailable."""

    def create(self, tenant: str, url: str, events: tuple[str, ...]) -> Endpoint:
        endpoint = Endpoint(
            id=f"we_{secrets.token_hex(12)}", tenant=tenant, url=url, events=events,
            secret=new_secret(), created_at=int(time.time()),
        )  # fmt: skip
        self._client.hset(ENDPOINTS, endpoint.id, _encode(endpoint))
        return endpoint

    def all(self) -> list[Endpoint]:
        endpoints = [_endpoint(record) for record in self._client.hvals(ENDPOINTS)]
        return sorted(endpoints, key=lambda endpoint: (endpoint.created_at, endpoint.id))

    def get(self, endpoint_id: str) -> Endpoint | None:
        record = self._client.hget(ENDPOINTS, endpoint_id)
        return _endpoint(record) if record is not None else None

    def delete(self, endpoint_id: str) -> bool:
        """Delete an endpoint; its webhooks that were not sent yet are dropped."""
        return bool(self._client.hdel(ENDPOINTS, endpoint_id))

    def note(self, delivery: Delivery) -> None:
        """Store a webhook, unless its id is known."""
        self._run("webhook_put", delivery.id, _encode(delivery), _REMEMBERED_S)

    def delivery(self, delivery_id: str) -> Delivery | None:
        document = self._client.get(f"warmq:gateway:webhook:{delivery_id}")
        return _delivery(document) if document is not None else None

    def write(self, delivery: Delivery) -> None:
        """Replace a stored webhook, which keeps its expiry."""
        self._run("webhook_put", delivery.id, _encode(delivery), "")
