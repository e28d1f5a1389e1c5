"""Uploads in parts: large files, which a client sends piece by piece and goes on with.

What is known of one is kept in Redis as JSON, and changed by whoever has read it last. Its file is
made by completing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from contract.redis.due import Claim
from gateway.files.files import safe_name, sweep_due
from gateway.files.protocol import ExpiresAfter, File, life_of, purpose_of
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, invalid, not_found
from gateway.http.json_api import new_id
from gateway.http.services import Services

#: An upload is open for so long: OpenAI's figure.
OPEN_S = 3600
#: Largest part, OpenAI's figure: the size of the SDKs' parts.
MOST_PART_BYTES = 64 * 2**20
#: Most parts, S3's figure.
MOST_PARTS = 10_000
#: Parts are looked for once more so long after the end: one may have been on its way then.
AGAIN_S = 600
#: An upload that has ended is remembered for so long.
REMEMBER_S = 86_400

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
    read = services.objects.get("upload", tenant, upload_id)
    if read is None:
        raise not_found("upload", upload_id)
    return _decode(read.document)


def change(
    services: Services,
    tenant: str,
    upload_id: str,
    to: Callable[[UploadRecord, float], UploadRecord],
) -> UploadRecord:
    """Change an upload, reading it again if somebody else has changed it meanwhile.

    `to` gets the record and the time (by Redis' clock), returns the same record where nothing is to
    change, and may raise.

    Raises:
        ApiError: 404, the tenant has none of that id; or what `to` raises.
    """
    while (read := services.objects.get("upload", tenant, upload_id)) is not None:
        record = _decode(read.document)
        anew = to(record, services.clock.now())
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


def create(services: Services, caller: Caller, asked: UploadCreate, upload_id: str) -> UploadRecord:
    """Begin an upload; return it, or the one that the same create has made before.

    Raises:
        ApiError: 400 for a wrong field, 413 for a file that is too large, 429 over the quota.
    """
    most = services.settings.gateway_max_file_bytes
    if asked.bytes < 1:
        raise invalid(f"bytes is {asked.bytes}; give the file's size, 1 at least", "bytes")
    if asked.bytes > most:
        raise ApiError(
            413, f"the file has {asked.bytes} bytes; at most {most} are taken here",
            code="file_too_large", param="bytes",
        )  # fmt: skip
    now, fields = int(services.clock.now()), {"purpose": asked.purpose}
    if after := asked.expires_after:
        fields["expires_after"] = msgspec.json.encode(after).decode()
    record = UploadRecord(
        id=upload_id, tenant=caller.tenant, bytes=asked.bytes, created_at=now,
        expires_at=now + OPEN_S, filename=safe_name(asked.filename), purpose=purpose_of(fields),
        file_id=new_id("file-"), life_s=life_of(fields),
    )  # fmt: skip
    services.limits.check_records(caller)
    services.due.add("upload", upload_id, OPEN_S * 1000)  # first: then nothing counts for ever
    services.limits.note_bytes(caller, upload_id, asked.bytes)
    if services.objects.create("upload", caller.tenant, upload_id, now, encode(record)):
        return record
    return get(services, caller.tenant, upload_id)


def add_part(
    services: Services, caller: Caller, upload_id: str, part_id: str, size: int
) -> UploadRecord:
    """Note a part whose content is about to be in the store.

    Raises:
        ApiError: 400, the upload is not open, or has more parts than its file can need; 429, the
            caller may not keep so many bytes.
    """

    def with_part(record: UploadRecord, now: float) -> UploadRecord:
        check_open(record, now)
        if record.status == "completing":
            raise ApiError(
                400, f"upload {record.id} is being completed: it takes no more parts",
                code="upload_not_pending", param="upload_id",
            )  # fmt: skip
        parts = record.parts | {part_id: size}
        # Parts whose answers were lost are sent again, so there may be more than the file's bytes.
        if len(parts) > MOST_PARTS or sum(parts.values()) > 2 * record.bytes + MOST_PART_BYTES:
            raise invalid(
                f"upload {upload_id} has too many parts for its {record.bytes} bytes: send at most "
                f"{MOST_PARTS}, each once", "data", "too_many_parts",
            )  # fmt: skip
        return msgspec.structs.replace(record, parts=parts)

    services.limits.check_records(caller)
    record = change(services, caller.tenant, upload_id, with_part)
    services.limits.note_bytes(caller, upload_id, held(record))
    return record


def cancel(services: Services, tenant: str, upload_id: str) -> UploadRecord:
    """End an upload without a file; one that was cancelled stays so.

    Raises:
        ApiError: 404; 400 for one that is completed or has expired.
    """

    def cancelled(record: UploadRecord, now: float) -> UploadRecord:
        if record.status == "cancelled":
            return record
        check_open(record, now)
        return with_status(record, "cancelled", now)

    record = change(services, tenant, upload_id, cancelled)
    services.limits.forget_bytes(tenant, upload_id)
    services.due.add("upload", upload_id)
    return record


def sweep(services: Services) -> int:
    """Expire uploads whose time is over, and remove parts of those that have ended."""
    return sweep_due(services, "upload", partial(_sweep_one, services))


def _sweep_one(services: Services, claim: Claim) -> bool:
    owner, now = services.objects.owner_of("upload", claim.id), services.clock.now()
    if owner is None:  # its create did not come to an end
        services.limits.forget_bytes("", claim.id)
        services.due.finish(claim)
        return True
    record = change(services, owner, claim.id, _expired)
    if record.status not in ENDED:
        services.due.release(claim, int((_open_until(record) - now) * 1000) + 1)
        return True
    for part_id in record.parts:
        services.store.delete(part_id)
    services.limits.forget_bytes(owner, claim.id)
    age_s = now - record.changed_at
    if age_s < REMEMBER_S:
        wait_s = (AGAIN_S if age_s < AGAIN_S else REMEMBER_S) - age_s
        services.due.release(claim, int(wait_s * 1000) + 1)
        return True
    services.objects.delete("upload", owner, claim.id)
    services.due.finish(claim)
    return True


def _open_until(record: UploadRecord) -> int:
    """Return when an upload expires; one that is being completed has an hour for that."""
    return record.changed_at + OPEN_S if record.status == "completing" else record.expires_at


def _expired(record: UploadRecord, now: float) -> UploadRecord:
    if record.status in ENDED or now < _open_until(record):
        return record
    return with_status(record, "expired", now)
