"""All lines of a batch that has ended, in the order of its file: one for each request."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import orjson

from contract import naming
from contract.batch import Batch
from contract.errors import RequestFailed, RequestRejected
from contract.openai.lines import parse_line
from contract.results import ResultLine, failure_meta, result_line
from gateway.batches.api.record import BatchRecord, Part
from gateway.batches.runner.routing import Sharing
from gateway.http.services import Services
from producer.collect.collect import Collector
from producer.input.reader import Input, InputUnreadable, chunks
from producer.input.unpacking import Watch

#: What follows a success' answer (contract/results.py); of several the last one is it, for within
#: texts quotes are escaped.
_NUMBER = re.compile(rb'"error":null,"warmq":\{"line":(\d+)')


def all_lines(
    services: Services, record: BatchRecord, batches: list[Batch | None], path: Path | None,
    watch: Watch | None = None,
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
    watch: Watch | None,
) -> Iterator[ResultLine]:  # fmt: skip
    if batch is not None:
        yield from Collector(services.batches, batch, follow=False).lines("input")
    if path is not None:
        with suppress(InputUnreadable):  # what comes behind that has not been queued either
            yield from _not_queued(services, record, at, batch, path, watch)


def _not_queued(
    services: Services, record: BatchRecord, at: int, batch: Batch | None, path: Path,
    watch: Watch | None,
) -> Iterator[ResultLine]:  # fmt: skip
    part, sharing = record.parts[at], Sharing(record.parts, at)
    cursor = batch.number("cursor") if batch is not None else 0
    limit = services.settings.max_line_bytes
    code = "cancelled" if record.status == "cancelling" or batch is None else "expired"
    told = f"it was {code} before it was queued" if batch is not None else "it was deleted"
    error = RequestFailed(told, code=code)
    with closing(Input(str(path), watch=watch)) as source:
        for chunk in chunks(source.lines(), None, limit):
            if chunk.cursor <= cursor:
                continue
            for number, line in chunk.lines:
                if number > cursor and sharing.takes(line):
                    yield _ended(part, number, line, error)


def _ended(part: Part, number: int, line: bytes, error: RequestFailed) -> ResultLine:
    custom_id = f"line-{number}"
    request_id = naming.line_request_id(part.batch_id, number)
    try:
        read = parse_line(line).custom_id
    except RequestRejected as refused:
        read = refused.custom_id
    if read is not None:
        custom_id, request_id = read, naming.request_id(part.batch_id, read)
    meta = failure_meta(
        request_id, error, batch=part.batch_id, custom_id=custom_id, line=number, revoked=True
    )
    return result_line(request_id, custom_id, number, meta)
