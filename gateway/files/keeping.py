"""A file that was received becomes one of its tenant's; or nothing of it stays."""

from __future__ import annotations

from gateway.files.incoming import Incoming
from gateway.files.objects import FileRecord, Files
from gateway.files.protocol import safe_name
from gateway.http.caller import Caller
from gateway.http.idempotency import conflict
from gateway.http.services import Services
from gateway.store import Writer


def record_of(
    file_id: str,
    mine: Caller,
    incoming: Incoming,
    purpose: str,
    life: int | None,
    now: int,
    digest: str = "",
) -> FileRecord:
    """Return the record of a file that was received, to be kept `life` seconds (None: for ever)."""
    return FileRecord(
        id=file_id, tenant=mine.tenant, bytes=incoming.size, created_at=now,
        filename=safe_name(incoming.filename or ""), purpose=purpose,
        expires_at=None if life is None else now + life, digest=digest,
    )  # fmt: skip


def check_same(known: FileRecord, again: FileRecord) -> None:
    """Raise ApiError (409) if a file of the same Idempotency-Key is another one."""
    if (known.digest and known.digest != again.digest) or known.bytes != again.bytes:
        raise conflict()


def keep(used: Services, mine: Caller, writer: Writer, record: FileRecord) -> FileRecord:
    """Write it down, and keep what `writer` has written.

    Raises:
        ApiError: 409 if another file has its id, 413 or 429 if the tenant may not keep so much.
    """
    files = Files(used)
    if known := files.get(mine.tenant, record.id):  # a retry whose first answer was forgotten
        check_same(known, record)
        return known
    used.limits.check_records(mine)
    files.announce(record.id)  # first: nothing may lie in the store, or count, that nobody knows of
    used.limits.note_bytes(mine, record.id, record.bytes)
    writer.commit()
    return files.create(record)
