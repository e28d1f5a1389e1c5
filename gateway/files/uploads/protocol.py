"""What goes over the wire of uploads, as OpenAI writes it."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.files.protocol import File
from gateway.files.uploads.record import UploadRecord


class ExpiresAfter(msgspec.Struct):
    """After how long the file is removed, from when it is there."""

    anchor: Literal["created_at"]
    seconds: int


class UploadCreate(msgspec.Struct, kw_only=True):
    """The body of a create; `bytes` is the size of the whole file."""

    bytes: int
    filename: str
    mime_type: str
    purpose: str
    expires_after: ExpiresAfter | None = None


class UploadComplete(msgspec.Struct, kw_only=True):
    """The body of a complete: parts in the file's order, MD5 of the file in hexadecimal."""

    part_ids: list[str]
    md5: str | None = None


class Upload(msgspec.Struct, kw_only=True):
    """An upload."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: File | UnsetType = UNSET


class UploadPart(msgspec.Struct, kw_only=True):
    """A part of an upload."""

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


def shown(record: UploadRecord, file: File | None = None) -> Upload:
    """Return an upload as clients see it; one that is being completed is still pending."""
    return Upload(
        id=record.id, bytes=record.bytes, created_at=record.created_at,
        expires_at=record.expires_at, filename=record.filename, purpose=record.purpose,
        status="pending" if record.status == "completing" else record.status,
        file=UNSET if file is None else file,
    )  # fmt: skip
