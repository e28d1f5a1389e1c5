"""Writes a batch's output and error files, in OpenAI's form."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from contract.results import ResultLine
from gateway.batches.api.output_lines import openai_line, usage_of
from gateway.batches.api.record import Counts, Usage
from gateway.batches.runner.carried import Carried, Changed
from gateway.files.objects import FileRecord, Files
from gateway.store import Writer

#: Bytes given to the store at once.
PIECE = 2**20
_PURPOSE = "batch_output"
_Kind = Literal["output", "error"]


@dataclass(slots=True)
class Written:
    """The ids of the files, None for one that would be empty; what they have."""

    output_file_id: str | None = None
    error_file_id: str | None = None
    counts: Counts = field(default_factory=Counts)
    usage: Usage = field(default_factory=Usage)


class _File:
    """One of the two files, begun with its first line."""

    def __init__(self, batch: Carried, kind: _Kind) -> None:
        self.id = file_id_of(batch.record.id, kind)
        self.kind = kind
        self._batch = batch
        self._services = batch.services
        self._record = batch.record
        self._stack = ExitStack()
        self._writer: Writer | None = None
        self._gathered: list[bytes] = []
        self._size = 0

    def add(self, line: bytes) -> None:
        """Append a line."""
        self._gathered += (line, b"\n")
        self._size += len(line) + 1
        if self._size >= PIECE:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            Files(self._services).announce(self.id)
            self._writer = self._stack.enter_context(self._services.store.write(self.id))
        self._writer.write(b"".join(self._gathered))
        self._gathered, self._size = [], 0

    def commit(self) -> str | None:
        """Make the file visible to its owner; return its id, None if it has no line.

        Raises:
            Changed, GivenUp: another one may have ended the batch, and its owner deleted the file.
        """
        if self._gathered:
            self._flush()
        if self._writer is None:
            return None
        services, record = self._services, self._record
        self._batch.check()
        size, now = self._writer.commit(), int(services.clock.now())
        kept_s = record.output_expires_after_s
        made = FileRecord(
            id=self.id,
            tenant=record.tenant,
            bytes=size,
            created_at=now,
            filename=f"{record.id}_{self.kind}.jsonl",
            purpose=_PURPOSE,
            expires_at=None if kept_s is None else now + kept_s,
        )
        services.limits.count_bytes(record.tenant, self.id, size)
        if not Files(services).create_of_batch(made, self._batch.stored):
            raise Changed
        return self.id

    def close(self) -> None:
        """Remove what was not committed."""
        self._stack.close()


def file_id_of(batch_id: str, kind: _Kind) -> str:
    """Return the id of a batch's file: the same whoever writes it, and however often."""
    return "file-" + hashlib.sha256(f"{kind}\0{batch_id}".encode()).hexdigest()[:24]


def write_files(batch: Carried, lines: Iterable[ResultLine], report: Callable[[], None]) -> Written:
    """Write both files; `report` is called for each line, and may raise to stop it.

    Raises:
        Changed, GivenUp: the batch is another one's by now.
        StoreFailed: nothing is left of the files then; it can be done again.
    """
    written = Written()
    counts, usage = written.counts, written.usage
    with ExitStack() as stack:
        output, errors = (_File(batch, kind) for kind in ("output", "error"))
        stack.callback(output.close)
        stack.callback(errors.close)
        for line in lines:
            text = openai_line(line)
            if line.failed:
                counts.failed += 1
                errors.add(text)
            else:
                counts.completed += 1
                output.add(text)
                used = usage_of(text)
                usage.input += used.input
                usage.output += used.output
                usage.cached += used.cached
                usage.reasoning += used.reasoning
            report()
        written.output_file_id = output.commit()
        written.error_file_id = errors.commit()
    counts.total = counts.completed + counts.failed
    return written
