"""Message batches as they go over the wire: Anthropic's field names and types."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from msgspec import Struct

from contract.redis.objects import Stored
from gateway.batches.api.record import ENDED, BatchRecord

#: A batch's window, and how long its results are kept, in seconds.
WINDOW_S, KEPT_S = 86_400, 29 * 86_400
ENDPOINT = "/v1/messages"
PREFIX = "msgbatch_"


class Split(Struct, omit_defaults=True):
    """How the requests of a batch that has ended have ended, those without an answer by kind."""

    errored: int = 0
    canceled: int = 0
    expired: int = 0


class RequestCounts(Struct, kw_only=True):
    """Requests by state; all are `processing` until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(Struct, kw_only=True):
    """One batch; times are RFC 3339."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: RequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None = None
    results_url: str | None


class MessageBatchList(Struct, kw_only=True):
    """A page of batches."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Deleted(Struct, kw_only=True):
    """A batch is gone."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def shown(record: BatchRecord, split: Split, base_url: str) -> MessageBatch:
    """Return a batch as Anthropic shows it; `base_url` is where its caller reaches this gateway."""
    ended, at = record.status in ENDED, record.changed_at
    if ended:
        counts = RequestCounts(
            succeeded=record.counts.completed, errored=split.errored, canceled=split.canceled,
            expired=split.expired,
        )  # fmt: skip
    else:
        counts = RequestCounts(processing=record.counts.total)
    running: Literal["in_progress", "canceling"] = (
        "canceling" if "cancelling" in at else "in_progress"
    )
    return MessageBatch(
        id=record.id,
        processing_status="ended" if ended else running,
        request_counts=counts,
        created_at=_time(record.created_at),
        expires_at=_time(record.expires_at),
        ended_at=_time(at[record.status]) if ended and record.status in at else None,
        cancel_initiated_at=_time(at["cancelling"]) if "cancelling" in at else None,
        results_url=f"{base_url}/v1/messages/batches/{record.id}/results" if ended else None,
    )


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


_split: msgspec.json.Decoder[Split | None] = msgspec.json.Decoder(Split | None)


def split_in(stored: Stored) -> Split | None:
    """Return what was counted before; None if nothing was."""
    return _split.decode(stored.document)
