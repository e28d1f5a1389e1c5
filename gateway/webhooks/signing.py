"""Events as OpenAI sends them, signed as Standard Webhooks prescribes."""

from __future__ import annotations

import base64
import hashlib
import hmac

import orjson

from gateway.redis.webhooks import Delivery


def body_of(delivery: Delivery) -> bytes:
    """Return the JSON of an event: byte for byte the same on each try."""
    event_id = hashlib.sha256(f"{delivery.batch_id}\0{delivery.event}".encode()).hexdigest()[:32]
    return orjson.dumps({
        "id": f"evt_{event_id}",
        "object": "event",
        "type": delivery.event,
        "created_at": delivery.created_at,
        "data": {"id": delivery.batch_id},
    })  # fmt: skip


def headers_of(delivery: Delivery, body: bytes, secret: str, now: int) -> dict[str, str]:
    """Return the headers by which a receiver verifies a try made `now` (s since 1970).

    The id is that of the delivery on each try, the time and so the signature those of the try:
    receivers take no signature that is older than five minutes.
    """
    signed = b".".join((delivery.id.encode(), str(now).encode(), body))
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {
        "content-type": "application/json",
        "webhook-id": delivery.id,
        "webhook-timestamp": str(now),
        "webhook-signature": f"v1,{signature}",
    }
