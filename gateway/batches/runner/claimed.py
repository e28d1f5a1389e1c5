"""One batch while it is carried: its record, written back only as it was read."""

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

#: Between two looks at the record while lines are read, in seconds; and between two times that its
#: file is asked to be kept.
_LOOK_S, _KEEP_S = 1.0, 60.0


class Changed(Exception):
    """Somebody else has written the record, or its time is over: look at it again."""


class ClaimedBatch:
    """A batch's record as it was read last, and its file, which is opened once."""

    def __init__(
        self, services: Services, held: Lease[Claim], stored: Stored, stop: threading.Event
    ) -> None:
        self.services = services
        self._held = held
        self._stop = stop
        self.stored = stored
        self.record: BatchRecord = decode(stored.document)
        self._next_look = time.monotonic() + _LOOK_S
        self._next_keep = float("-inf")
        self._opened = ExitStack()
        self._path: Path | None = None

    def close(self) -> None:
        """Let go of the file."""
        self._opened.close()

    def read_again(self) -> bool:
        """Read the record anew; return False if it is not there any more."""
        (stored,) = self.services.objects.get_many("batch", [self.record.id])
        if stored is not None:
            self.stored, self.record = stored, decode(stored.document)
        return stored is not None

    @property
    def late(self) -> bool:
        """Whether the completion window is over."""
        return self.services.clock.now() >= self.record.expires_at

    def check(self) -> None:
        """Raise LeaseLost if this process is to stop work on it."""
        self._held.check()
        if self._stop.is_set():
            raise LeaseLost

    def write(self, status: Status | None = None, **changes: Any) -> BatchRecord:
        """Write changes of the record.

        Raises:
            Changed: somebody else has written it.
            LeaseLost: somebody else carries it.
        """
        self.check()
        record = changed(self.services, self.record, status, **changes)
        stored = write_back(self.services, self.stored, record)
        if stored is None:
            raise Changed
        self.stored, self.record = stored, record
        return record

    def keep_input(self) -> None:
        """Have the file that it reads stay, also if its owner deletes it or its life ends."""
        if time.monotonic() >= self._next_keep:
            self._next_keep = time.monotonic() + _KEEP_S
            Files(self.services).keep_content(self.record.input_file_id, self.record.id)

    def go_on(self, *, ends_late: bool = True) -> None:
        """Return if reading its lines still makes sense. What is only looked through is read to its
        end also if it is late, for the lines of the error file.

        Raises:
            Changed: it was cancelled, or its window is over.
            LeaseLost: somebody else carries it.
        """
        self.check()
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        self.keep_input()
        (found,) = self.services.objects.get_many("batch", [self.record.id])
        if found is None or found.version != self.stored.version or (ends_late and self.late):
            raise Changed

    def input(self) -> Path | None:
        """Return the batch's file, for as long as this is not closed; None if it was deleted.

        Raises:
            FileStoreFailed: its content is not here, although nobody has deleted it.
        """
        services, name = self.services, self.record.input_file_id
        if self._path is None and services.store.size(name) is not None:
            self._path = self._opened.enter_context(services.store.local(name))
        if self._path is None and services.objects.owner_of("file", name) is not None:
            raise FileStoreFailed(
                f"file {name} is not in {services.settings.gateway_store}, where this gateway "
                "keeps files: give all of them one bucket, or a folder that they share"
            )
        return self._path

    def caller(self) -> Caller:
        """Return who made the batch; without its key, which may be revoked, no limits hold."""
        record = self.record
        key = self.services.keys.get(record.key_id) if record.key_id else None
        return Caller.of(key) if key is not None else Caller(tenant=record.tenant)
