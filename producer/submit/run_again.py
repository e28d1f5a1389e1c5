"""Runs again the requests whose answers were cut off at their limit of tokens.

Redis has no messages of answered requests. They are written anew from the batch's input, whose
lines must be those that were submitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson

from contract.batch import Batch
from contract.errors import BatchConflict, RequestRejected
from contract.index import IndexChunk, leader_of
from contract.message import MessageWriter
from contract.openai.body import LIMITS
from contract.openai.lines import Request, parse_line
from contract.redis.batches import BatchStore
from contract.results import is_cut
from producer.batch_watch import different_file
from producer.input.reader import RawChunk
from producer.input.source import Source, open_source
from producer.input.tables.kept import split_kept
from producer.submit import batch_trace
from producer.submit.lines import in_line
from producer.submit.routes import Routes
from producer.submit.submission import seed_of


def program_input(batch: Batch) -> str:
    """Return what a program submitted, for example `a DataFrame`; '' for a file."""
    name = batch.fields.get("input", "")
    return name if name.startswith("a ") and not Path(name).exists() else ""


def open_again(batch: Batch, name: str = "", columns: Mapping[str, str] | None = None) -> Source:
    """Open a batch's input, or the file `name` with its lines, as the submit did.

    Raises:
        InputUnreadable, BadOption, BadPlace, ExtraMissing: as `open_source`.
    """
    fields = batch.fields
    return open_source(
        name or fields.get("input", ""),
        columns or orjson.loads(fields.get("columns") or "{}"),
        orjson.loads(fields.get("options") or "{}").get("keep", ()),
        delimiter=fields.get("delimiter", ""),
    )


def run_cut_again(
    store: BatchStore,
    batch: Batch,
    source: Source,
    overrides: Mapping[str, Any],
    max_line_bytes: int,
) -> tuple[int, str]:
    """Run the requests with a cut answer again, with the fields `overrides` in their bodies.

    The new answers replace the cut ones. A limit of tokens goes into the field that a line has for
    it. An answer stays if it would be cut in the same way: with temperature 0, and no higher limit.
    Closes the source.

    Returns:
        The number of lines that get another answer, and a text about the answers that stay, ''
        without any.

    Raises:
        BatchConflict: the source has other lines than the batch, the batch is being cancelled, or
            all cut answers stay.
        RequestRejected: a line is not valid with these fields.
        InputUnreadable, StoreUnavailable: some requests may be queued already; a repeated call
            queues the remaining ones.
    """
    options = batch.fields.get("options", "{}")
    fields = orjson.loads(options).get("set", {})
    writers, count, unchanged = _Writers(store, batch, orjson.loads(options)), 0, 0
    with closing(source):
        raws = source.chunks(seed_of(options), max_line_bytes)
        stored = store.index(batch.id)
        for chunk in stored:
            raw = next(raws, None)
            if raw is None or (raw.cursor, raw.digest) != (chunk.cursor, chunk.digest):
                at = f"it differs within the lines up to {chunk.cursor}"
                raise different_file(batch.id, at)
            cut = list(_new_messages(store, batch, raw, chunk, (fields, overrides), writers))
            requests = [each for each in cut if each is not None]
            unchanged += len(cut) - len(requests)
            if requests:
                count += store.retry_cut(batch, requests)
    stays = "answer stays" if unchanged == 1 else "answers stay"
    text = (
        f"{unchanged:,} {stays} as cut: at temperature 0 and with no higher limit the same text "
        "would come; give a higher max_tokens"
    )
    if unchanged and not count:
        raise BatchConflict(f"batch {batch.id}: {text}")
    return count, text if unchanged else ""


def _new_messages(
    store: BatchStore,
    batch: Batch,
    raw: RawChunk,
    chunk: IndexChunk,
    fields: tuple[dict[str, Any], Mapping[str, Any]],
    writers: _Writers,
) -> Iterator[tuple[str, str, str, bytes] | None]:
    """Yield id, SHA-1 of the result, queue and new message of each request with a cut answer.

    Yields None for a request that would get the same answer. By the SHA-1 the script recognizes a
    result that has changed meanwhile, and keeps it.
    """
    ids = chunk.request_ids(batch.id)
    found = zip(raw.lines, chunk.entries, ids, store.results(ids), strict=True)
    for (number, line), entry, request_id, result in found:
        # Followers get the new answer of their leader.
        if result is None or leader_of(entry) or not is_cut(result):
            continue
        try:
            request = _parse(split_kept(line)[0], *fields)
        except RequestRejected as error:
            raise (raw.explain or in_line)(number, line, error) from None
        if _would_be_cut_again(request, line, fields):
            yield None
            continue
        queue = writers.routes.queue_of(request)
        message = writers.of(queue).write(
            request_id, entry[1], number, request.url, request.body, request.sequences
        )
        digest = hashlib.sha1(result, usedforsecurity=False).hexdigest()
        yield request_id, digest, queue, message


def _would_be_cut_again(
    request: Request, line: bytes, fields: tuple[dict[str, Any], Mapping[str, Any]]
) -> bool:
    """Return whether a request would be cut as before: it is greedy and has no higher limit."""
    set_before, overrides = fields
    if overrides.keys() - {name for names in LIMITS.values() for name in names}:
        return False
    body = orjson.loads(request.body)
    limit, limit_before = _limit(request.url, body), None
    if limit is not None and body.get("temperature") == 0:
        before = parse_line(split_kept(line)[0], set_before)
        limit_before = _limit(before.url, orjson.loads(before.body))
    return limit is not None and limit_before is not None and limit <= limit_before


def _limit(url: str, body: dict[str, Any]) -> int | None:
    """Return a body's limit of tokens; None without one."""
    return next((body[n] for n in reversed(LIMITS.get(url, ())) if body.get(n) is not None), None)


def _parse(line: bytes, fields: dict[str, Any], overrides: Mapping[str, Any]) -> Request:
    """Return a line's request with the batch's fields and those of the retry."""
    limits = {name for names in LIMITS.values() for name in names} & overrides.keys()
    if len(limits) == 1:
        before, (limit,) = parse_line(line, fields), limits
        names, body = LIMITS.get(before.url, ()), orjson.loads(before.body)
        own = [name for name in names if body.get(name) is not None]
        own = own or ([limit] if limit in names else [*names[:1]])
        if own:
            rest = {name: value for name, value in overrides.items() if name != limit}
            overrides = rest | dict.fromkeys(own, overrides[limit])
    return parse_line(line, {**fields, **overrides})


class _Writers:
    """Writes a batch's messages for each of its queues; a passed deadline no longer applies."""

    def __init__(self, store: BatchStore, batch: Batch, options: dict[str, Any]) -> None:
        self.routes = Routes(batch.routes, batch.fields.get("queue", ""))
        deadline = batch.number("deadline")
        applies = deadline > store.now_ms()
        self._batch, self._priority = batch, int(options.get("priority", 6))
        self._deadline = deadline / 1000 if applies else None
        self._by_queue: dict[str, MessageWriter] = {}

    def of(self, queue: str) -> MessageWriter:
        """Return the writer for a queue."""
        if queue not in self._by_queue:
            batch = self._batch
            self._by_queue[queue] = MessageWriter(
                batch.id,
                int(batch.created),
                batch.life,
                queue,
                self._priority,
                self._deadline,
                batch.fields.get(batch_trace.FIELD, ""),
            )
        return self._by_queue[queue]
