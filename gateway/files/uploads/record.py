"""What is known of an upload: kept in Redis as JSON, changed by whoever has read it last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from gateway.http.errors import ApiError, not_found
from gateway.http.services import Services

Status = Literal["pending", "completing", "completed", "cancelled", "expired"]
ENDED: frozenset[Status] = frozenset(("completed", "cancelled", "expired"))


class UploadRecord(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One upload. Times are in seconds since 1970; `bytes` is what was announced.

    `parts` has the size of each part by its id, which is its name in the store, too. A part is
    noted here before its content is in the store: so none is there that nobody would remove.
    `chosen` are the parts of which the file is made, in order, and its MD5 ('' : not told).
    """

    id: str
    tenant: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    file_id: str
    life_s: int | None = None
    status: Status = "pending"
    changed_at: int = 0
    parts: dict[str, int] = {}
    chosen: tuple[list[str], str] | None = None


_decode = msgspec.json.Decoder(UploadRecord).decode
encode = msgspec.json.Encoder().encode


def get(services: Services, tenant: str, upload_id: str) -> UploadRecord:
    """Return a tenant's upload.

    Raises:
        ApiError: 404, it has none of that id.
    """
    return change(services, tenant, upload_id, lambda record: record)


def change(
    services: Services, tenant: str, upload_id: str, to: Callable[[UploadRecord], UploadRecord]
) -> UploadRecord:
    """Change an upload, reading it again if somebody else has changed it meanwhile.

    `to` returns the same record where nothing is to change, and may raise.

    Raises:
        ApiError: 404, the tenant has none of that id; or what `to` raises.
    """
    while (read := services.objects.get("upload", tenant, upload_id)) is not None:
        record = _decode(read.document)
        anew = to(record)
        if anew is record:
            return record
        if services.objects.replace("upload", tenant, read, encode(anew), anew.created_at):
            return anew
    raise not_found("upload", upload_id)


def held(record: UploadRecord) -> int:
    """Return the bytes that an open upload counts as: those announced, or more that it has got."""
    return max(record.bytes, sum(record.parts.values()))


def with_status(record: UploadRecord, status: Status, now: float) -> UploadRecord:
    """Return a record with another status, which it has from now on (Redis' time, in s)."""
    return msgspec.structs.replace(record, status=status, changed_at=int(now))


def check_open(record: UploadRecord, now: float) -> None:
    """Raise ApiError (400) unless the upload is open, and in time (by Redis' clock)."""
    late = record.status == "pending" and now >= record.expires_at
    if record.status in ENDED or late:
        status = "expired" if late else record.status
        raise ApiError(
            400, f"upload {record.id} is {status}; begin a new one with POST /v1/uploads",
            code="upload_not_pending", param="upload_id",
        )  # fmt: skip
