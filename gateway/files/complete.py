"""Makes the file of an upload's parts: piece by piece, so that its size does not matter.

A gateway may die at any step. The upload names its file from the beginning, so whoever completes it
again with the same parts makes the same file, and a second try beside a first does no harm.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import partial

import msgspec

from gateway.file_store import FileStoreFailed, Writer
from gateway.files.files import FileRecord, Files
from gateway.files.uploads import (
    ENDED,
    UploadComplete,
    UploadRecord,
    change,
    check_open,
    get,
    held,
    with_status,
)
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, invalid
from gateway.http.services import Services

_MD5 = re.compile(r"[0-9a-f]{32}")


def complete(
    services: Services, caller: Caller, upload_id: str, asked: UploadComplete
) -> tuple[UploadRecord, FileRecord | None]:
    """Make the file; return the upload, and its file unless that was deleted since.

    Raises:
        ApiError: 404; 400 for an upload that is not open, parts that are not its own, do not make
            up its bytes, or have another MD5; 409 while it is completed with other parts.
        FileStoreFailed: a part cannot be read, or the file not written; nothing of it stays.
    """
    md5 = (asked.md5 or "").lower()
    if md5 and not _MD5.fullmatch(md5):
        raise invalid("md5 must be 32 hexadecimal digits: those of the whole file", "md5")
    chosen = (asked.part_ids, md5)
    record = change(services, caller.tenant, upload_id, partial(_begun, chosen))
    files = Files(services)
    if record.status == "completed":  # an earlier try, whose answer was lost
        return record, files.get(caller.tenant, record.file_id)
    try:
        with services.store.write(record.file_id) as writer:
            _assemble(services, record, writer)
            check_open(get(services, caller.tenant, upload_id), services.clock.now())
            files.sweep_later(record.file_id)  # first: nothing may count that nobody knows of
            # In this order, as `note_bytes` counts the upload's announced bytes until now.
            services.limits.forget_bytes(caller.tenant, record.id)
            services.limits.note_bytes(caller, record.file_id, record.bytes)
            writer.commit()
        file = files.create(_file_of(record, int(services.clock.now())))
        record = change(services, caller.tenant, upload_id, _completed)
    except (ApiError, FileStoreFailed):
        record = change(services, caller.tenant, upload_id, _open_again)
        if record.status == "completed":  # another try was faster, and its parts are gone
            return record, files.get(caller.tenant, record.file_id)
        if record.status in ENDED:  # it was cancelled meanwhile
            files.delete(caller.tenant, record.file_id)
        services.limits.forget_bytes(caller.tenant, record.file_id)
        if record.status == "pending":
            with suppress(ApiError):  # where others have taken the room, its next part is refused
                services.limits.note_bytes(caller, upload_id, held(record))
        raise
    services.due.add("upload", upload_id)  # its parts are no longer needed
    return record, file


def _begun(chosen: tuple[list[str], str], record: UploadRecord, now: float) -> UploadRecord:
    """Return the record as it is while the file is made."""
    if record.status == "completed" and record.chosen == chosen:
        return record
    check_open(record, now)
    if record.status == "completing":
        if record.chosen == chosen:  # another try is at it, or has died
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
            told = f"part {part_id[:100]!r} is none of upload {record.id}; send it first"
            raise invalid(told, "part_ids")
    size = sum(record.parts[part_id] for part_id in part_ids)
    if size != record.bytes:
        raise invalid(
            f"the parts have {size} bytes, and the upload was begun with bytes {record.bytes}; "
            "name all parts, in order", "part_ids", "bytes_mismatch",
        )  # fmt: skip
    return msgspec.structs.replace(with_status(record, "completing", now), chosen=chosen)


def _assemble(services: Services, record: UploadRecord, writer: Writer) -> None:
    assert record.chosen is not None  # noqa: S101 - so says the status
    part_ids, md5 = record.chosen
    running = hashlib.md5(usedforsecurity=False)
    for part_id in part_ids:
        size = services.store.size(part_id)
        if size != record.parts[part_id]:
            told = f"part {part_id} did not arrive whole; send it again, and name the new part"
            raise invalid(told, "part_ids")
        for piece in services.store.read(part_id):
            if md5:
                running.update(piece)
            writer.write(piece)
    if md5 and running.hexdigest() != md5:
        raise invalid(
            f"the MD5 of the parts is {running.hexdigest()}, not {md5}; send what differs again",
            "md5", "md5_mismatch",
        )  # fmt: skip


def _completed(record: UploadRecord, now: float) -> UploadRecord:
    if record.status == "completed":
        return record
    check_open(record, now)  # cancelled meanwhile: then there is no file
    return with_status(record, "completed", now)


def _open_again(record: UploadRecord, now: float) -> UploadRecord:
    return with_status(record, "pending", now) if record.status == "completing" else record


def _file_of(record: UploadRecord, now: int) -> FileRecord:
    return FileRecord(
        id=record.file_id, tenant=record.tenant, bytes=record.bytes, created_at=now,
        filename=record.filename, purpose=record.purpose,
        expires_at=None if record.life_s is None else now + record.life_s,
    )  # fmt: skip
