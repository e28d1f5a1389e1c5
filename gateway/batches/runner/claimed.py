"""Reads and writes the record of one claimed batch, and opens its input file."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from contract.redis.due import Claim
from contract.redis.objects import Stored
from gateway.batches.api.record import BatchRecord, Status, changed, decode, write_back
from gateway.file_store import FileStoreFailed
from gateway.files.files import Files
from gateway.http.caller import Caller
from gateway.http.services import Services
from gateway.redis.leases import Lease, LeaseLost

#: Seconds between two reads of the record, and between two calls that keep the file's content.
_LOOK_S, _KEEP_S = 1.0, 60.0


class Changed(Exception):
    """The record has changed, or its deadline has passed: read the record again."""


class ClaimedBatch:
    """A batch that this process runs under a lease.

    Its input file is opened only once.
    """

    def __init__(
        self, services: Services, lease: Lease[Claim], stored: Stored, stop: threading.Event
    ) -> None:
        self.services = services
        self._lease = lease
        self._stop = stop
        self.stored = stored
        self.record: BatchRecord = decode(stored.document)
        self._next_look = time.monotonic() + _LOOK_S
        self._next_keep = float("-inf")
        self._opened = ExitStack()
        self._path: Path | None = None

    def close(self) -> None:
        self._opened.close()

    def read_again(self) -> bool:
        """Read the record again; return False if it was deleted."""
        (stored,) = self.services.objects.get_many("batch", [self.record.id])
        if stored is not None:
            self.stored, self.record = stored, decode(stored.document)
        return stored is not None

    @property
    def late(self) -> bool:
        return self.services.clock.now() >= self.record.expires_at

    def check_lease(self) -> None:
        """Raise LeaseLost if another process may have the batch, or this process stops."""
        self._lease.check()
        if self._stop.is_set():
            raise LeaseLost

    def write(self, status: Status | None = None, **changes: Any) -> BatchRecord:
        """Write changes; raise LeaseLost, or Changed if another process has written the record."""
        self.check_lease()
        record = changed(self.services, self.record, status, **changes)
        stored = write_back(self.services, self.stored, record)
        if stored is None:
            raise Changed
        self.stored, self.record = stored, record
        return record

    def keep_input(self) -> None:
        """Keep the input file's content, even if its tenant deletes the file or it expires."""
        if time.monotonic() >= self._next_keep:
            self._next_keep = time.monotonic() + _KEEP_S
            Files(self.services).keep_content(self.record.input_file_id, self.record.id)

    def check(self, *, check_deadline: bool = True) -> None:
        """Check the lease and, once a second, the record; keep the input file's content.

        Raises:
            Changed: The record has changed or, with `check_deadline`, its deadline has passed.
            LeaseLost: Another process may have the batch, or this process stops.
        """
        self.check_lease()
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        self.keep_input()
        (stored,) = self.services.objects.get_many("batch", [self.record.id])
        if (
            stored is None
            or stored.version != self.stored.version
            or (check_deadline and self.late)
        ):
            raise Changed

    def input(self) -> Path | None:
        """Return the input file's path, valid until `close`; None if the file was deleted."""
        services, name = self.services, self.record.input_file_id
        if self._path is None and services.store.size(name) is not None:
            self._path = self._opened.enter_context(services.store.local(name))
        if self._path is None and services.objects.owner_of("file", name) is not None:
            raise FileStoreFailed(
                f"file {name} is not in {services.settings.gateway_store}, where this gateway "
                "keeps files: give all gateways one bucket, or one shared folder"
            )
        return self._path

    def caller(self) -> Caller:
        """Return the caller who created the batch, without limits if the key is not found."""
        record = self.record
        key = self.services.keys.get(record.key_id) if record.key_id else None
        return Caller.of(key) if key is not None else Caller(tenant=record.tenant)
