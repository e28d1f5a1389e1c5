"""Creates, completes and cancels uploads: files that a client sends in upload parts.

A gateway may die at any step. The record names the file from the beginning, so completing an upload
again with the same parts makes the same file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from contract.redis.due import Claim
from gateway.file_store import FileStoreFailed, Writer
from gateway.files.files import FileRecord, Files, remove_due, safe_name
from gateway.files.protocol import ExpiresAfter, File, life_of, purpose_of
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, invalid, not_found
from gateway.http.json_api import new_id
from gateway.http.services import Services

#: Seconds after which an upload expires (OpenAI's figure).
OPEN_S = 3600
#: Largest upload part in bytes (OpenAI's figure, and the size of the SDKs' parts).
MOST_PART_BYTES = 64 * 2**20
#: Most parts of an upload (S3's figure).
MOST_PARTS = 10_000
#: Seconds after an upload's end at which its parts are deleted again: one may have arrived late.
AGAIN_S = 600
#: Seconds for which the record of an ended upload is kept.
REMEMBER_S = 86_400
_MD5 = re.compile(r"[0-9a-f]{32}")

Status = Literal["pending", "completing", "completed", "cancelled", "expired"]
ENDED: frozenset[Status] = frozenset(("completed", "cancelled", "expired"))


class UploadRecord(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One upload. Times are seconds since 1970; `bytes` is the declared size.

    `parts` maps the id of each part, which is its name in the store, to its size. A part is noted
    here before it is stored, so that every stored part is removed in the end.
    `chosen` has the ids of the file's parts, in order, and the file's MD5 ('' if none was given).
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


class UploadCreate(msgspec.Struct, kw_only=True):
    """The body of a create; `bytes` is the size of the whole file."""

    bytes: int
    filename: str
    mime_type: str
    purpose: str
    expires_after: ExpiresAfter | None = None


class UploadComplete(msgspec.Struct, kw_only=True):
    """The body of POST /complete: the file's parts in order, and the file's MD5 in hex."""

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


_decode = msgspec.json.Decoder(UploadRecord).decode
encode = msgspec.json.Encoder().encode


def upload_object(record: UploadRecord, file: File | None = None) -> Upload:
    """Return an upload as OpenAI's API shows it: `pending` while it is being completed."""
    return Upload(
        id=record.id, bytes=record.bytes, created_at=record.created_at,
        expires_at=record.expires_at, filename=record.filename, purpose=record.purpose,
        status="pending" if record.status == "completing" else record.status,
        file=UNSET if file is None else file,
    )  # fmt: skip


def get(services: Services, tenant: str, upload_id: str) -> UploadRecord:
    read = services.objects.get("upload", tenant, upload_id)
    if read is None:
        raise not_found("upload", upload_id)
    return _decode(read.document)


def change(
    services: Services,
    tenant: str,
    upload_id: str,
    changed: Callable[[UploadRecord, float], UploadRecord],
) -> UploadRecord:
    """Replace an upload's record, retrying if another process has replaced it meanwhile.

    `changed` gets the record and Redis's time, and returns the same record to change nothing.

    Raises:
        ApiError: 404 if there is no such upload; also the errors that `changed` raises.
    """
    while (read := services.objects.get("upload", tenant, upload_id)) is not None:
        record = _decode(read.document)
        new = changed(record, services.clock.now())
        if new is record:
            return record
        if services.objects.replace("upload", tenant, read, encode(new), new.created_at):
            return new
    raise not_found("upload", upload_id)


def counted_bytes(record: UploadRecord) -> int:
    """Return the bytes that an open upload adds to its tenant's file bytes."""
    return max(record.bytes, sum(record.parts.values()))


def _with_status(record: UploadRecord, status: Status, now: float) -> UploadRecord:
    return msgspec.structs.replace(record, status=status, changed_at=int(now))


def check_open(record: UploadRecord, now: float) -> None:
    """Raise ApiError (400) unless the upload is open at `now` (Redis's time)."""
    late = record.status == "pending" and now >= record.expires_at
    if record.status in ENDED or late:
        status = "expired" if late else record.status
        message = f"upload {record.id} is {status}; begin a new one with POST /v1/uploads"
        raise invalid(message, "upload_id", "upload_not_pending")


def create(services: Services, caller: Caller, asked: UploadCreate, upload_id: str) -> UploadRecord:
    """Begin an upload, unless an earlier try has done so; raise ApiError (400, 413, 429)."""
    most = services.settings.gateway_max_file_bytes
    if asked.bytes < 1:
        raise invalid(f"bytes is {asked.bytes}; give the file's size, 1 at least", "bytes")
    if asked.bytes > most:
        raise ApiError(
            413, f"the file has {asked.bytes} bytes; this gateway takes at most {most}",
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
    # The upload becomes due before its bytes count: if this gateway dies, another subtracts them.
    services.due.add("upload", upload_id, OPEN_S * 1000)
    services.limits.check_and_count_bytes(caller, upload_id, asked.bytes)
    if services.objects.create("upload", caller.tenant, upload_id, now, encode(record)):
        return record
    return get(services, caller.tenant, upload_id)


def add_part(services: Services, caller: Caller, upload_id: str, part_id: str, size: int) -> None:
    """Note a part that is about to be stored; raise ApiError (400, 429)."""

    def with_part(record: UploadRecord, now: float) -> UploadRecord:
        check_open(record, now)
        if record.status == "completing":
            message = f"upload {record.id} is being completed: it takes no more parts"
            raise invalid(message, "upload_id", "upload_not_pending")
        parts = record.parts | {part_id: size}
        # A client sends a part again if the answer was lost, so parts may be larger than the file.
        if len(parts) > MOST_PARTS or sum(parts.values()) > 2 * record.bytes + MOST_PART_BYTES:
            raise invalid(
                f"upload {upload_id} has too many parts for its {record.bytes} bytes: send at most "
                f"{MOST_PARTS}, each once", "data", "too_many_parts",
            )  # fmt: skip
        return msgspec.structs.replace(record, parts=parts)

    services.limits.check_records(caller)
    record = change(services, caller.tenant, upload_id, with_part)
    services.limits.check_and_count_bytes(caller, upload_id, counted_bytes(record))


def cancel(services: Services, tenant: str, upload_id: str) -> UploadRecord:
    """Cancel an upload, which may be cancelled already; raise ApiError (400, 404)."""

    def cancelled(record: UploadRecord, now: float) -> UploadRecord:
        if record.status == "cancelled":
            return record
        check_open(record, now)
        return _with_status(record, "cancelled", now)

    record = change(services, tenant, upload_id, cancelled)
    services.limits.forget_bytes(tenant, upload_id)
    services.due.add("upload", upload_id)
    return record


def complete(
    services: Services, caller: Caller, upload_id: str, asked: UploadComplete
) -> tuple[UploadRecord, FileRecord | None]:
    """Join the parts to the file; return the upload, and the file if it still exists.

    Raises:
        ApiError: 404 for an unknown upload; 400 for one that is not open, or for parts that are
            unknown, incomplete or have another MD5; 409 while it is completed with other parts.
        FileStoreFailed: A part cannot be read, or the file cannot be written; no file is left.
    """
    md5 = (asked.md5 or "").lower()
    if md5 and not _MD5.fullmatch(md5):
        raise invalid("md5 must be 32 hexadecimal digits: those of the whole file", "md5")
    chosen = (asked.part_ids, md5)
    record = change(services, caller.tenant, upload_id, partial(_completing, chosen))
    files = Files(services)
    if record.status == "completed":  # the answer of an earlier complete was lost
        return record, files.get(caller.tenant, record.file_id)
    try:
        with services.store.write(record.file_id) as writer:
            _join_parts(services, record, writer)
            check_open(get(services, caller.tenant, upload_id), services.clock.now())
            files.remove_later(record.file_id)
            # The upload's declared bytes are subtracted first: else both would count.
            services.limits.forget_bytes(caller.tenant, record.id)
            services.limits.check_and_count_bytes(caller, record.file_id, record.bytes)
            writer.commit()
        file = files.create(_file_of(record, int(services.clock.now())))
        record = change(services, caller.tenant, upload_id, _completed)
    except (ApiError, FileStoreFailed):
        record = change(services, caller.tenant, upload_id, _reopened)
        # Another process has completed it, and its parts are deleted.
        if record.status == "completed":
            return record, files.get(caller.tenant, record.file_id)
        _uncount(services, caller, record)
        raise
    services.due.add("upload", upload_id)  # its parts can be deleted
    return record, file


def _uncount(services: Services, caller: Caller, record: UploadRecord) -> None:
    """Subtract the bytes of a file that was not made; add those of an open upload again."""
    if record.status in ENDED:
        Files(services).delete(caller.tenant, record.file_id)
    services.limits.forget_bytes(caller.tenant, record.file_id)
    if record.status == "pending":
        # If other files have used up the quota, the upload's next part is refused.
        with suppress(ApiError):
            services.limits.check_and_count_bytes(caller, record.id, counted_bytes(record))


def _completing(chosen: tuple[list[str], str], record: UploadRecord, now: float) -> UploadRecord:
    if record.status == "completed" and record.chosen == chosen:
        return record
    check_open(record, now)
    if record.status == "completing":
        if record.chosen == chosen:  # another process is completing it, or has died
            return record
        raise ApiError(
            409, f"upload {record.id} is being completed with other parts; ask again",
            code="upload_completing", param="part_ids", retry=True, after_s=2,
        )  # fmt: skip
    part_ids = chosen[0]
    if len(set(part_ids)) < len(part_ids):
        raise invalid("part_ids names a part twice; name each once", "part_ids")
    for part_id in part_ids:
        if part_id not in record.parts:
            message = f"upload {record.id} has no part {part_id[:100]!r}; send it first"
            raise invalid(message, "part_ids")
    size = sum(record.parts[part_id] for part_id in part_ids)
    if size != record.bytes:
        message = (
            f"the parts have {size} bytes, and the upload was begun with bytes {record.bytes}; "
            "name all parts, in order"
        )
        raise invalid(message, "part_ids", "bytes_mismatch")
    return msgspec.structs.replace(_with_status(record, "completing", now), chosen=chosen)


def _join_parts(services: Services, record: UploadRecord, writer: Writer) -> None:
    assert record.chosen is not None  # noqa: S101 - a completing upload has it
    part_ids, md5 = record.chosen
    digest = hashlib.md5(usedforsecurity=False)
    for part_id in part_ids:
        if services.store.size(part_id) != record.parts[part_id]:
            message = f"part {part_id} did not arrive whole; send it again, and name the new part"
            raise invalid(message, "part_ids")
        for piece in services.store.read(part_id):
            if md5:
                digest.update(piece)
            writer.write(piece)
    if md5 and digest.hexdigest() != md5:
        message = f"the MD5 of the parts is {digest.hexdigest()}, not {md5}; send them again"
        raise invalid(message, "md5", "md5_mismatch")


def _completed(record: UploadRecord, now: float) -> UploadRecord:
    if record.status == "completed":
        return record
    check_open(record, now)
    return _with_status(record, "completed", now)


def _reopened(record: UploadRecord, now: float) -> UploadRecord:
    return _with_status(record, "pending", now) if record.status == "completing" else record


def _file_of(record: UploadRecord, now: int) -> FileRecord:
    return FileRecord(
        id=record.file_id, tenant=record.tenant, bytes=record.bytes, created_at=now,
        filename=record.filename, purpose=record.purpose,
        expires_at=None if record.life_s is None else now + record.life_s,
    )  # fmt: skip


def remove_expired(services: Services) -> int:
    """Expire uploads whose time is over, and delete the parts of ended uploads."""
    return remove_due(services, "upload", partial(_remove_one, services))


def _remove_one(services: Services, claim: Claim) -> bool:
    owner, now = services.objects.owner_of("upload", claim.id), services.clock.now()
    if owner is None:  # a gateway died before it wrote the record
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
    """Return the time at which an upload expires; one being completed gets another hour."""
    return record.changed_at + OPEN_S if record.status == "completing" else record.expires_at


def _expired(record: UploadRecord, now: float) -> UploadRecord:
    if record.status in ENDED or now < _open_until(record):
        return record
    return _with_status(record, "expired", now)
