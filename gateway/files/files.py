"""Creates, reads and deletes tenants' files: records in Redis, contents in the store.

The name of a content in the store is the file's id.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from contract.errors import StoreFull
from contract.redis.due import Claim, Work
from contract.redis.objects import Stored
from gateway.file_store import FileStoreFailed, Writer
from gateway.files.multipart import ReceivedForm
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.http.idempotency import conflict
from gateway.http.services import Services

log = logging.getLogger(__name__)

#: Milliseconds after which a content without a record is removed: its gateway has died, or its
#: tenant has deleted the file while a batch reads it.
_ORPHAN_MS = 600_000
#: Milliseconds of the lease on a file or upload that may be removed, most claims in one call, and
#: most calls for all files or uploads that are due.
_LEASE_MS, _CLAIMS, _CALLS = 60_000, 20, 250
#: Records that are read in one call to fill a page with files of one purpose.
_AT_ONCE = 500
#: Prefix of the name of an empty file that identifies a store.
MARK = "warmq-store-"
_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\]")


class FileRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One file. Times are seconds since 1970.

    `digest` is set if the file came with an Idempotency-Key: a hash of its content and form fields.
    """

    id: str
    tenant: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    digest: str = ""


_decode = msgspec.json.Decoder(FileRecord).decode
_encode = msgspec.json.Encoder().encode


def safe_name(name: str) -> str:
    """Return a client's file name without path separators and control characters."""
    return _UNSAFE.sub("_", name)[-255:] or "upload"


class Files:
    """The files of one Redis and store. Calls raise StoreUnavailable or FileStoreFailed."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def remove_later(self, file_id: str) -> None:
        """Remove a content in _ORPHAN_MS if it has no record then; call this before writing it."""
        self._services.due.add("file", file_id, _ORPHAN_MS)

    def keep_content(self, file_id: str, batch_id: str) -> None:
        """Keep a content until a batch has ended, even if its file is deleted."""
        self._services.objects.note_reader(file_id, batch_id)
        self.remove_later(file_id)

    def create(self, record: FileRecord) -> FileRecord:
        """Write the record of a stored content; return it, or the record that exists already."""
        if not self._services.objects.create(
            "file", record.tenant, record.id, record.created_at, _encode(record), record.expires_at
        ):
            return self.get(record.tenant, record.id) or record
        self._remove_when_expired(record)
        return record

    def _remove_when_expired(self, record: FileRecord) -> None:
        if record.expires_at is not None:
            left_s = max(0, record.expires_at - self._services.clock.now())
            self._services.due.add("file", record.id, int(left_s * 1000))

    def create_of_batch(self, record: FileRecord, batch: Stored) -> bool:
        """Write the record of a batch's output file, unless the batch has changed.

        A record with another size is replaced: it was written before some results expired.

        Returns:
            Whether the record exists now; if not, the content is removed later.
        """
        objects, document = self._services.objects, _encode(record)
        self.remove_later(record.id)
        read = objects.get("file", record.tenant, record.id)
        if read is not None and _decode(read.document).bytes == record.bytes:
            return True
        owner, end = record.tenant, record.expires_at
        if read is not None:
            new = (document, record.created_at, end, batch)
            written = objects.replace("file", owner, read, *new) is not None
        else:
            created = record.created_at
            written = objects.create("file", owner, record.id, created, document, end, batch)
        if written:
            self._remove_when_expired(record)
        return written

    def get(self, tenant: str, file_id: str) -> FileRecord | None:
        stored = self._services.objects.get("file", tenant, file_id)
        return _decode(stored.document) if stored else None

    def page(
        self, tenant: str, after: str, limit: int, *, oldest_first: bool, purpose: str | None
    ) -> tuple[list[FileRecord], bool] | None:
        """Return a page of files, and whether more follow; None if `after` is unknown."""
        files: list[FileRecord] = []
        most = limit if purpose is None else max(limit, _AT_ONCE)
        while True:
            page = self._services.objects.page(
                "file", tenant, after=after, limit=most, oldest_first=oldest_first
            )
            if page is None:
                return None
            records = [_decode(stored.document) for stored in page.objects]
            files += [r for r in records if purpose in (None, r.purpose)]
            if len(files) > limit or not page.has_more:
                return files[:limit], len(files) > limit or page.has_more
            if purpose is None and len(files) == limit:
                return files, True
            after = records[-1].id

    def delete(self, tenant: str, file_id: str) -> bool:
        """Delete a tenant's file; return whether it existed.

        If a batch may still read the content, it is removed later, and its bytes count until then.
        """
        if self.get(tenant, file_id) is None:
            return False
        self.remove_later(file_id)
        if not self._services.objects.delete("file", tenant, file_id):
            return False
        if not self._services.objects.has_reader(file_id):
            self._services.store.delete(file_id)
            self._services.limits.forget_bytes(tenant, file_id)
        return True

    def remove_expired(self) -> int:
        """Remove contents whose record has expired or was never written; return their number."""
        return remove_due(self._services, "file", self._remove_one)

    def _remove_one(self, claim: Claim) -> bool:
        services = self._services
        owner = services.objects.owner_of("file", claim.id)
        record = self.get(owner, claim.id) if owner is not None else None
        if record is None and services.objects.is_read(claim.id):
            services.due.release(claim, _ORPHAN_MS)
            return False
        if record is None:
            services.store.delete(claim.id)
            services.limits.forget_bytes("", claim.id)
        elif record.expires_at is not None:
            left_s = max(1, record.expires_at - services.clock.now())
            services.due.release(claim, int(left_s * 1000) + 1)
            return False
        services.due.finish(claim)
        return record is None


def remove_due(services: Services, kind: Work, remove: Callable[[Claim], bool]) -> int:
    """Claim the due work of a kind; return the number of claims for which `remove` was true."""
    count = 0
    for _ in range(_CALLS):
        claims = services.due.claim(kind, _LEASE_MS, _CLAIMS)
        for claim in claims:
            try:
                count += remove(claim)
            except (ApiError, FileStoreFailed) as error:  # it is tried again later
                log.warning(
                    "%s %s is not removed: %s",
                    kind,
                    claim.id,
                    error.message,
                    extra={"action": "no_sweep"},
                )
        if len(claims) < _CLAIMS:
            break
    return count


def new_record(
    file_id: str, caller: Caller, form: ReceivedForm, purpose: str, life_s: int | None, now: int,
    digest: str = "",
) -> FileRecord:  # fmt: skip
    """Return the record of a received file that expires after `life_s` (None: never)."""
    return FileRecord(
        id=file_id, tenant=caller.tenant, bytes=form.size, created_at=now,
        filename=safe_name(form.filename or ""), purpose=purpose,
        expires_at=None if life_s is None else now + life_s, digest=digest,
    )  # fmt: skip


def check_same_file(earlier: FileRecord, repeated: FileRecord) -> None:
    """Raise ApiError (409) if an earlier try with this Idempotency-Key sent another file."""
    if (earlier.digest and earlier.digest != repeated.digest) or earlier.bytes != repeated.bytes:
        raise conflict()


def save_file(services: Services, caller: Caller, writer: Writer, record: FileRecord) -> FileRecord:
    """Commit a file's content and its record; raise ApiError (409, 429)."""
    files = Files(services)
    if earlier := files.get(caller.tenant, record.id):  # the answer to an earlier try was lost
        check_same_file(earlier, record)
        return earlier
    services.limits.check_records(caller)
    files.remove_later(record.id)
    services.limits.check_and_count_bytes(caller, record.id, record.bytes)
    writer.commit()
    return files.create(record)


def check_same_store(services: Services) -> None:
    """Raise FileStoreFailed unless the store has the mark of the gateways of this Redis.

    The mark is an empty file, which the first gateway writes and notes in Redis. If gateways used
    two stores, each would lack half of the files.
    """
    mark = services.objects.store_mark()
    if mark is None:
        new_mark = f"{MARK}{secrets.token_hex(12)}"
        with services.store.write(new_mark) as writer:
            writer.commit()
        try:
            mark = services.objects.mark_store(new_mark)
        except StoreFull:  # Redis is full: the next start sets the mark
            mark = new_mark
        if mark != new_mark:
            services.store.delete(new_mark)
    if services.store.size(mark) is None:
        store = services.settings.gateway_store
        place = store if "://" in store else str(Path(store).absolute())
        shown = store if place == store else f"{store} ({place})"
        raise FileStoreFailed(
            f"WARMQ_GATEWAY_STORE: {shown} is not the store of the other gateways of this Redis, "
            "and files of one would be missing at the other; give all of them one bucket, or one "
            "shared folder. If the old store is lost, or was moved without its file "
            f"{mark}, remove warmq:gateway:store from Redis"
        )
