"""Writes an ended batch's output and error files, in the order of its input."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Literal

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
from gateway.files.protocol import OUTPUT_PURPOSE
from gateway.http.json_api import id_of
from gateway.http.services import Services
from producer.collect.collect import Collector
from producer.input.decompression import ReadHook
from producer.input.reader import Input, InputUnreadable

#: Bytes that are written to the store at a time.
PIECE = 2**20
_Kind = Literal["output", "error"]
#: Text before the line number in a success (contract/results.py). The search begins at the end of
#: the line: the last match is not part of an answer, whose quotes are escaped.
_MARK = b'"error":null,"warmq":{"line":'
_NUMBER = re.compile(re.escape(_MARK) + rb"(\d+)")


def all_lines(
    services: Services, record: BatchRecord, batches: list[Batch | None], path: Path | None,
    watch: ReadHook | None = None,
) -> Iterator[ResultLine]:  # fmt: skip
    """Yield the result lines of all queue batches (`batches`), which must have ended.

    Lines that were never queued, and those of a deleted queue batch (None), are read from `path`,
    the input file, if it still exists. `watch` may raise to stop the reading.

    Raises:
        BatchChanged: A queue batch was deleted or retried meanwhile.
    """
    streams = [
        _part_lines(services, record, index, batch, path, watch)
        for index, batch in enumerate(batches)
    ]
    if len(streams) == 1:
        yield from streams[0]
    else:
        yield from heapq.merge(*streams, key=_line_number)


def _line_number(line: ResultLine) -> int:
    if not line.failed:
        at = line.json.rfind(_MARK)
        match = _NUMBER.match(line.json, at) if at >= 0 else None
        return int(match[1]) if match else 0
    return int(orjson.loads(line.json)["error"].get("line") or 0)


def _part_lines(
    services: Services, record: BatchRecord, index: int, batch: Batch | None, path: Path | None,
    watch: ReadHook | None,
) -> Iterator[ResultLine]:  # fmt: skip
    if batch is not None:
        yield from Collector(services.batches, batch, follow=False).lines("input")
    if path is None:
        return
    part, lines = record.parts[index], PartLines(record.parts, index)
    cursor = batch.number("cursor") if batch is not None else 0
    code = "cancelled" if record.status == "cancelling" or batch is None else "expired"
    message = f"it was {code} before it was queued" if batch is not None else "it was deleted"
    error = RequestFailed(message, code=code)
    # If the file is damaged, the lines after the damage were not queued either.
    with suppress(InputUnreadable), closing(Input(str(path), watch=watch)) as source:
        for chunk in source.chunks(None, services.settings.max_line_bytes):
            if chunk.cursor <= cursor:
                continue
            for number, line in chunk.lines:
                if number > cursor and lines.takes(line):
                    yield _not_queued(part, number, line, error)


def _not_queued(part: BatchPart, number: int, line: bytes, error: RequestFailed) -> ResultLine:
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


class _File:
    """The output or error file of a batch; it is created when its first lines are written."""

    def __init__(self, batch: ClaimedBatch, kind: _Kind) -> None:
        self.id = file_id_of(batch.record.id, kind)
        self._kind = kind
        self._batch = batch
        self._stack = ExitStack()
        self._writer: Writer | None = None
        self._lines: list[bytes] = []
        self._size = 0

    def add(self, line: bytes) -> None:
        self._lines += (line, b"\n")
        self._size += len(line) + 1
        if self._size >= PIECE:
            self._flush()

    def _flush(self) -> None:
        services = self._batch.services
        if self._writer is None:
            Files(services).remove_later(self.id)
            self._writer = self._stack.enter_context(services.store.write(self.id))
        self._writer.write(b"".join(self._lines))
        self._lines, self._size = [], 0

    def commit(self) -> str | None:
        """Commit the file and its record; return its id, None if it has no lines."""
        if self._lines:
            self._flush()
        if self._writer is None:
            return None
        services, record = self._batch.services, self._batch.record
        self._batch.check_lease()
        size, now = self._writer.commit(), int(services.clock.now())
        kept_s = record.output_expires_after_s
        file = FileRecord(
            id=self.id,
            tenant=record.tenant,
            bytes=size,
            created_at=now,
            filename=f"{record.id}_{self._kind}.jsonl",
            purpose=OUTPUT_PURPOSE,
            expires_at=None if kept_s is None else now + kept_s,
        )
        services.limits.count_bytes(record.tenant, self.id, size)
        if not Files(services).create_of_batch(file, self._batch.stored):
            raise Changed
        return self.id

    def close(self) -> None:
        self._stack.close()


def file_id_of(batch_id: str, kind: _Kind) -> str:
    """Return the id of a batch's file, the same in every process that writes it."""
    return id_of("file-", f"{kind}\0{batch_id}")


def write_files(
    batch: ClaimedBatch, lines: Iterable[ResultLine], report: Callable[[], None]
) -> dict[str, Any]:
    """Write both files, calling `report` for each line; return the record's new fields."""
    counts, usage = RequestCounts(), Usage()
    with closing(_File(batch, "output")) as output, closing(_File(batch, "error")) as errors:
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
        ids = {"output_file_id": output.commit(), "error_file_id": errors.commit()}
    counts.total = counts.completed + counts.failed
    return ids | {"counts": counts, "usage": usage}
