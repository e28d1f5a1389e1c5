"""Files of tenants: a record in Redis, the content in the store under the file's id."""

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

#: A content without a record is removed after so long: its gateway died between the two, or a batch
#: may read what its owner has deleted.
_ORPHAN_MS = 600_000
#: For how long one gateway sweeps a file or an upload before another may.
_SWEEP_MS = 60_000
#: How many are taken at a time to be swept, and how often in one sweep.
_CLAIMS, _SWEEPS = 20, 250
#: Records read at once where few of them may be of the purpose that is asked for.
_AT_ONCE = 500
#: Names of marks in the store begin so: an empty content each.
MARK = "warmq-store-"
_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\]")


class FileRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is known of a file. Times are in seconds since 1970.

    `digest` is of all that shaped it, if it came with an Idempotency-Key: a retry has the same.
    """

    id: str
    tenant: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    digest: str = ""


def safe_name(name: str) -> str:
    """Return a client's file name without what could be a path or a header's end."""
    return _UNSAFE.sub("_", name)[-255:] or "upload"


_decode = msgspec.json.Decoder(FileRecord).decode
_encode = msgspec.json.Encoder().encode


class Files:
    """The files of one Redis and store; each call raises StoreUnavailable or FileStoreFailed."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def sweep_later(self, file_id: str) -> None:
        """Say that a content is about to be there: without a record it is removed later."""
        self._services.due.add("file", file_id, _ORPHAN_MS)

    def keep_content(self, file_id: str, batch_id: str) -> None:
        """Keep a content until a batch has ended, whatever becomes of its file."""
        self._services.objects.note_reader(file_id, batch_id)
        self.sweep_later(file_id)

    def create(self, record: FileRecord) -> FileRecord:
        """Make the record of a content that is in the store; return it, or that of its id."""
        objects = self._services.objects
        if not objects.create(
            "file", record.tenant, record.id, record.created_at, _encode(record), record.expires_at
        ):
            return self.get(record.tenant, record.id) or record
        self._expire_in_time(record)
        return record

    def _expire_in_time(self, record: FileRecord) -> None:
        if record.expires_at is not None:
            left_s = max(0, record.expires_at - self._services.clock.now())
            self._services.due.add("file", record.id, int(left_s * 1000))

    def create_of_batch(self, record: FileRecord, batch: Stored) -> bool:
        """Make the record of a batch's file, in place of one of another size, which was written of
        results that have expired since.

        Returns:
            Whether it is there; False, with the content left to be swept, if the batch has changed.
        """
        objects, document = self._services.objects, _encode(record)
        self.sweep_later(record.id)  # first: nobody else may sweep it if nothing follows
        read = objects.get("file", record.tenant, record.id)
        if read is not None and _decode(read.document).bytes == record.bytes:
            return True
        options = (document, record.created_at, record.expires_at, batch)
        if read is not None:
            written = objects.replace("file", record.tenant, read, *options) is not None
        else:
            written = objects.create(
                "file", record.tenant, record.id, record.created_at, document, record.expires_at,
                batch,
            )  # fmt: skip
        if written:
            self._expire_in_time(record)
        return written

    def get(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return a tenant's file; None if it has none of that id."""
        found = self._services.objects.get("file", tenant, file_id)
        return _decode(found.document) if found else None

    def page(
        self, tenant: str, after: str, limit: int, *, oldest_first: bool, purpose: str | None
    ) -> tuple[list[FileRecord], bool] | None:
        """Return a page of a tenant's files, and whether there are more; None: no such `after`.

        With a purpose, as many pages are read as it takes to fill this one.
        """
        found: list[FileRecord] = []
        while True:
            most = limit if purpose is None else max(limit, _AT_ONCE)
            page = self._services.objects.page(
                "file", tenant, after=after, limit=most, oldest_first=oldest_first
            )
            if page is None:
                return None
            records = [_decode(stored.document) for stored in page.objects]
            found += [r for r in records if purpose is None or r.purpose == purpose]
            if len(found) > limit or not page.has_more:
                return found[:limit], len(found) > limit or page.has_more
            if purpose is None and len(found) == limit:
                return found, page.has_more
            after = records[-1].id

    def delete(self, tenant: str, file_id: str) -> bool:
        """Remove a tenant's file; return whether it was there.

        If a batch may still read its content, that is swept later, and counts until then.
        """
        if self.get(tenant, file_id) is None:
            return False
        self.sweep_later(file_id)  # first: a gateway that dies then leaves its content to be swept
        if not self._services.objects.delete("file", tenant, file_id):
            return False
        if not self._services.objects.has_reader(file_id):
            self._services.store.delete(file_id)
            self._services.limits.forget_bytes(tenant, file_id)
        return True

    def sweep(self) -> int:
        """Remove contents whose record has expired or never came; return how many."""
        return sweep_due(self._services, "file", self._sweep_one)

    def _sweep_one(self, claim: Claim) -> bool:
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


def sweep_due(services: Services, kind: Work, sweep_one: Callable[[Claim], bool]) -> int:
    """Sweep what is due of a kind; return for how many `sweep_one` says so."""
    count = 0
    for _ in range(_SWEEPS):
        claims = services.due.claim(kind, _SWEEP_MS, _CLAIMS)
        for claim in claims:
            try:
                count += sweep_one(claim)
            except (ApiError, FileStoreFailed) as error:  # its lease ends, and it is swept again
                told = (kind, claim.id, error.message)
                log.warning("%s %s is not swept: %s", *told, extra={"action": "no_sweep"})
        if len(claims) < _CLAIMS:
            break
    return count


def new_record(
    file_id: str,
    mine: Caller,
    incoming: ReceivedForm,
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


def check_same_file(known: FileRecord, again: FileRecord) -> None:
    """Raise ApiError (409) if a file of the same Idempotency-Key is another one."""
    if (known.digest and known.digest != again.digest) or known.bytes != again.bytes:
        raise conflict()


def save_file(used: Services, mine: Caller, writer: Writer, record: FileRecord) -> FileRecord:
    """Write it down, and keep what `writer` has written.

    Raises:
        ApiError: 409 if another file has its id, 413 or 429 if the tenant may not keep so much.
    """
    files = Files(used)
    if known := files.get(mine.tenant, record.id):  # a retry whose first answer was forgotten
        check_same_file(known, record)
        return known
    used.limits.check_records(mine)
    files.sweep_later(
        record.id
    )  # first: nothing may lie in the store, or count, that nobody knows of
    used.limits.note_bytes(mine, record.id, record.bytes)
    writer.commit()
    return files.create(record)


def check_same_store(services: Services) -> None:
    """Return if this gateway's store is that of the others; the first one marks it.

    Raises:
        FileStoreFailed: it is another one: half of the files would be missing here and there.
    """
    mark = services.objects.store_mark()
    if mark is None:
        made = f"{MARK}{secrets.token_hex(12)}"
        with services.store.write(made) as writer:
            writer.commit()
        try:
            mark = services.objects.mark_store(made)
        except StoreFull:  # the next start does it
            mark = made
        if mark != made:
            services.store.delete(made)
    if services.store.size(mark) is None:
        raise FileStoreFailed(
            f"WARMQ_GATEWAY_STORE: {_named(services.settings.gateway_store)} is not the store of "
            "the other gateways of this Redis, and files of one would be missing at the other; "
            "give all of them one bucket, or one folder that they share. If the old store is lost, "
            f"or was moved without its file {mark}, remove warmq:gateway:store from Redis"
        )


def _named(store: str) -> str:
    """Return a store as it was given, a relative folder with where it is, too."""
    whole = store if "://" in store else str(Path(store).absolute())
    return store if whole == store else f"{store} ({whole})"
