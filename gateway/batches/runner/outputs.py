"""A batch's output and error files, in OpenAI's form: all lines of a batch that has ended, in the
order of its file, one for each request."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import orjson

from contract import naming
from contract.batch import Batch
from contract.errors import RequestFailed
from contract.results import ResultLine, failure_meta, result_line
from gateway.batches.api.output_lines import openai_line, usage_of
from gateway.batches.api.record import BatchPart, BatchRecord, RequestCounts, Usage
from gateway.batches.runner.claimed import Changed, ClaimedBatch
from gateway.batches.runner.input_file import custom_id_of
from gateway.batches.runner.queueing import PartLines
from gateway.file_store import Writer
from gateway.files.files import FileRecord, Files
from gateway.http.json_api import id_of
from gateway.http.services import Services
from producer.collect.collect import Collector
from producer.input.decompression import ReadHook
from producer.input.reader import Input, InputUnreadable

#: Bytes given to the store at once.
PIECE = 2**20
_PURPOSE = "batch_output"
_Kind = Literal["output", "error"]
#: What follows a success' answer (contract/results.py); of several the last one is it, for within
#: texts quotes are escaped.
_NUMBER = re.compile(rb'"error":null,"warmq":\{"line":(\d+)')


def all_lines(
    services: Services, record: BatchRecord, batches: list[Batch | None], path: Path | None,
    watch: ReadHook | None = None,
) -> Iterator[ResultLine]:  # fmt: skip
    """Yield the lines of all parts; all of `batches` have ended. `watch` may raise to end it.

    Lines that had not been queued when they ended, and those of a part that was deleted (None),
    are read from `path`, the batch's file, if it is still there: they have ended like the others.

    Raises:
        BatchChanged: a part was deleted or retried meanwhile.
    """
    streams = [
        _of_part(services, record, at, batch, path, watch) for at, batch in enumerate(batches)
    ]
    if len(streams) == 1:
        yield from streams[0]
    else:
        yield from heapq.merge(*streams, key=line_number)


def line_number(line: ResultLine) -> int:
    """Return where in the file a line's request was, from 1."""
    if not line.failed:
        at = line.json.rfind(b'"error":null,"warmq":{"line":')
        found = _NUMBER.match(line.json, at) if at >= 0 else None
        return int(found[1]) if found else 0
    return int(orjson.loads(line.json)["error"].get("line") or 0)


def _of_part(
    services: Services, record: BatchRecord, at: int, batch: Batch | None, path: Path | None,
    watch: ReadHook | None,
) -> Iterator[ResultLine]:  # fmt: skip
    if batch is not None:
        yield from Collector(services.batches, batch, follow=False).lines("input")
    if path is None:
        return
    part, sharing = record.parts[at], PartLines(record.parts, at)
    cursor = batch.number("cursor") if batch is not None else 0
    code = "cancelled" if record.status == "cancelling" or batch is None else "expired"
    told = f"it was {code} before it was queued" if batch is not None else "it was deleted"
    error = RequestFailed(told, code=code)
    # What comes behind a damaged place has not been queued either.
    with suppress(InputUnreadable), closing(Input(str(path), watch=watch)) as source:
        for chunk in source.chunks(None, services.settings.max_line_bytes):
            if chunk.cursor <= cursor:
                continue
            for number, line in chunk.lines:
                if number > cursor and sharing.takes(line):
                    yield _ended(part, number, line, error)


def _ended(part: BatchPart, number: int, line: bytes, error: RequestFailed) -> ResultLine:
    custom_id = custom_id_of(line)
    if custom_id is not None:
        request_id = naming.request_id(part.batch_id, custom_id)
    else:
        custom_id = f"line-{number}"
        request_id = naming.line_request_id(part.batch_id, number)
    meta = failure_meta(
        request_id, error, batch=part.batch_id, custom_id=custom_id, line=number, revoked=True
    )
    return result_line(request_id, custom_id, number, meta)


@dataclass(slots=True)
class Written:
    """The ids of the files, None for one that would be empty; what they have."""

    output_file_id: str | None = None
    error_file_id: str | None = None
    counts: RequestCounts = field(default_factory=RequestCounts)
    usage: Usage = field(default_factory=Usage)


class _File:
    """One of the two files, begun with its first line."""

    def __init__(self, batch: ClaimedBatch, kind: _Kind) -> None:
        self.id = file_id_of(batch.record.id, kind)
        self._kind = kind
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
            Files(self._services).sweep_later(self.id)
            self._writer = self._stack.enter_context(self._services.store.write(self.id))
        self._writer.write(b"".join(self._gathered))
        self._gathered, self._size = [], 0

    def commit(self) -> str | None:
        """Make the file visible to its owner; return its id, None if it has no line.

        Raises:
            Changed, LeaseLost: another process may have ended the batch.
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
            filename=f"{record.id}_{self._kind}.jsonl",
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
    return id_of("file-", f"{kind}\0{batch_id}")


def write_files(
    batch: ClaimedBatch, lines: Iterable[ResultLine], report: Callable[[], None]
) -> Written:
    """Write both files; `report` is called for each line, and may raise to stop it.

    Raises:
        Changed, LeaseLost: the batch is another one's by now.
        FileStoreFailed: nothing is left of the files then; it can be done again.
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
