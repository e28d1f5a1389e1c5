"""Converts lines to messages, and bad lines to error results; finds repeated bodies."""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from contract import naming
from contract.errors import RequestRejected
from contract.index import IndexChunk, IndexEntry, leader_of
from contract.message import MessageWriter, Written
from contract.openai.decode import decode
from contract.openai.lines import Request, parse_line
from contract.openai.repeatable import canonical
from contract.redis.known import KnownAnswer
from contract.results import failure_meta
from producer.input.reader import RawChunk, longer_than
from producer.input.seen import IN_MEMORY, KeyTable, SeenIds
from producer.input.tables.kept import split_kept, take_columns
from producer.submit.expected import ignore
from producer.submit.routes import NO_ROUTES, Routes


class KnownLine(NamedTuple):
    """A line whose answer is known: the answer, and what was written of the line."""

    answer: KnownAnswer
    written: Written


@dataclass(slots=True)
class PreparedChunk:
    """A chunk of lines, ready to send.

    `before` is the cursor (last line number) and digest of the chunk before it.
    """

    ordinal: int
    first: int
    before: tuple[int, str]
    index: IndexChunk
    messages: list[bytes] = field(default_factory=list)
    #: Queue of each message; empty without routes.
    queues: list[str] = field(default_factory=list)
    #: Request of each message; empty without `keep_requests`.
    requests: list[Request] = field(default_factory=list)
    #: With --reuse, by the number of the message: the known answer that replaces it.
    known: dict[int, KnownLine] = field(default_factory=dict)
    #: The time (ISO 8601) before which an answer is too old to be reused; `-` without one.
    oldest: bytes = b"-"
    #: Number of messages that will be queued later, in another order.
    announced: int = 0
    rejects: list[tuple[str, bytes]] = field(default_factory=list)
    #: Number of requests without a message, because an earlier line's result answers them.
    identical: int = 0
    #: Number of requests without max_tokens.
    without_limit: int = 0
    #: Number of lines with each ignored field.
    ignored: Counter[str] = field(default_factory=Counter)
    first_error: str = ""
    #: The kept columns of the lines (write_columns), b'' without any.
    columns: bytes = b""

    @property
    def bodies(self) -> list[tuple[str, bytes]]:
        """Url and body of each message; empty without `keep_requests`."""
        return [(request.url, request.body) for request in self.requests]

    def parts(self) -> tuple[list[bytes], list[str], bytes]:
        """Return messages to queue, their queues, and known answers, as ENQUEUE takes them."""
        if not self.known:
            return self.messages, self.queues, b""
        left = [n for n in range(len(self.messages)) if n not in self.known]
        queues = [self.queues[n] for n in left] if self.queues else []
        known = [
            b"%s %s %s %s %s" % (
                own.request_id, answer.request_id.encode(), answer.digest.encode(),
                own.line, own.custom_id,
            )
            for answer, own in self.known.values()
        ]  # fmt: skip
        return [self.messages[n] for n in left], queues, b"\n".join([self.oldest, *known])


@dataclass(frozen=True, slots=True)
class LinesToMessages:
    """Checks the lines of one file and writes their messages.

    `seen` remembers custom_ids as requests of this batch, or, if this batch is a window of a run,
    as requests of the run `run_name`; None if the caller knows that none is repeated. With
    `leaders`, a repeated body gets no message. `check` may raise RequestRejected for a valid
    request. With `keep_columns` the kept cells of each line are behind it
    (producer/input/tables/kept.py). `sample` gets the url and body of each valid request. With
    `routes` each line's model chooses its queue.
    """

    batch_id: str
    writer: MessageWriter
    overrides: dict[str, Any]
    max_line_bytes: int
    seen: SeenIds | None
    run_name: str = ""
    leaders: Leaders | None = None
    keep_requests: bool = False
    check: Callable[[Request], None] | None = None
    keep_columns: bool = False
    sample: Callable[[str, bytes], None] = ignore
    routes: Routes = NO_ROUTES

    def add_custom_id(self, custom_id: str, request_id: str) -> bool:
        """Remember a custom_id; return whether it is new."""
        if self.seen is None:
            return True
        name = self.run_name
        return self.seen.add(naming.request_id(name, custom_id) if name else request_id)

    def prepare(self, raw: RawChunk, before: tuple[int, str]) -> PreparedChunk:
        """Check a chunk's lines and write their messages. Empties `raw.lines`."""
        batch_id, overrides = self.batch_id, self.overrides
        entries: list[IndexEntry] = []
        index = IndexChunk(raw.cursor, raw.digest, entries)
        chunk = PreparedChunk(raw.ordinal, raw.first, before, index)
        write = None if self.routes.queues else self.writer.write
        add_custom_id, leaders = self.add_custom_id, self.leaders
        check, sample = self.check, self.sample
        chunk.columns = take_columns(raw) if self.keep_columns else b""
        raw.lines.reverse()
        while raw.lines:
            number, line = raw.lines.pop()  # frees a line's bytes when its message is written
            custom_id = None
            try:
                if number in raw.too_long:
                    problem = longer_than(self.max_line_bytes, raw.too_long[number])
                    raise RequestRejected(problem, code="line_too_long")
                request = parse_line(line, overrides)
                custom_id = request.custom_id
                if check is not None:
                    check(request)
                if custom_id is None:
                    request_id, by_line = naming.line_request_id(batch_id, number), True
                    custom_id = f"line-{number}"
                else:
                    request_id, by_line = naming.request_id(batch_id, custom_id), False
                    if not add_custom_id(custom_id, request_id):
                        raise _duplicate(custom_id)
            except RequestRejected as error:
                error.custom_id = error.custom_id or custom_id
                self._reject(chunk, number, (raw.explain or in_line)(number, line, error))
                continue
            chunk.without_limit += not request.limited
            sample(request.url, request.body)
            if request.ignored:
                chunk.ignored.update(request.ignored)
            if leaders and (leader := leaders.of(request, request_id)):
                entries.append((number, custom_id, by_line, leader))
                chunk.identical += 1
                continue
            entries.append((number, custom_id, by_line))
            message = (write or self._writer_of(request, chunk))(
                request_id, custom_id, number, request.url, request.body, request.sequences
            )
            chunk.messages.append(message)
            if self.keep_requests:
                chunk.requests.append(request)
        return chunk

    def _writer_of(self, request: Request, chunk: PreparedChunk) -> Callable[..., bytes]:
        """Return the function that writes a routed message; note its queue in the chunk."""
        queue = self.routes.queue_of(request)
        chunk.queues.append(queue)
        return self.routes.writers[queue].write

    def take_stored(self, raw: RawChunk, kept: IndexChunk) -> None:
        """Add the custom_ids and leaders of a chunk that was queued before."""
        lines = zip(raw.lines, kept.entries, kept.request_ids(self.batch_id), strict=True)
        for (_, line), entry, request_id in lines:
            _, custom_id, by_line = entry[:3]
            if not by_line:
                self.add_custom_id(custom_id, request_id)
            if self.leaders and not leader_of(entry):
                with suppress(RequestRejected):  # a bad line is not a leader
                    request = parse_line(split_kept(line)[0], self.overrides)
                    if by_line == (request.custom_id is None):  # else its custom_id was repeated
                        self.leaders.of(request, request_id)

    def _reject(self, chunk: PreparedChunk, number: int, error: RequestRejected) -> None:
        """Add the error result of a bad line."""
        batch_id, custom_id = self.batch_id, error.custom_id
        by_line, request_id = True, naming.line_request_id(batch_id, number)
        if custom_id is None:
            custom_id = f"line-{number}"
        elif error.code != "duplicate_custom_id":
            own_id = naming.request_id(batch_id, custom_id)
            if self.add_custom_id(custom_id, own_id):
                by_line, request_id = False, own_id
        meta = failure_meta(request_id, error, batch=batch_id, custom_id=custom_id, line=number)
        chunk.index.entries.append((number, custom_id, by_line))
        chunk.rejects.append((request_id, meta))
        chunk.first_error = chunk.first_error or error.message


def in_line(number: int, _: bytes, error: RequestRejected) -> RequestRejected:
    """Return the error of a line of a file."""
    return RequestRejected(
        f"line {number}, {error.message}",
        code=error.code,
        field=error.field,
        custom_id=error.custom_id,
    )


def _duplicate(custom_id: str) -> RequestRejected:
    return RequestRejected(
        f"field custom_id: {custom_id!r} was used before; make it unique",
        code="duplicate_custom_id",
        field="custom_id",
        custom_id=custom_id,
    )


_KEY_BYTES = 16


def dedupe_key(url: str, text: bytes) -> bytes | None:
    """Return a key that requests with the same answer have in common; None if answers may vary.

    `text` is a valid body's JSON.
    """
    try:
        body = canonical(url, decode(text))
    except RequestRejected:  # the worker decodes it in the same way, and reports the error
        return None
    if body is None:
        return None
    return hashlib.blake2b(url.encode() + b"\0" + body, digest_size=_KEY_BYTES).digest()


class Leaders:
    """Remembers the first request with each dedupe key (the leader), in bounded memory."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._first = KeyTable(_KEY_BYTES, in_memory, "request bodies")

    def of(self, request: Request, request_id: str) -> str:
        """Return the id of a request's leader; '' for a new leader or an answer that may vary.

        Raises WriteFailed if the temporary file cannot grow.
        """
        key = dedupe_key(request.url, request.body)
        if key is None:
            return ""
        first = self._first.put(key, bytes.fromhex(request_id.replace("-", "")))
        return str(uuid.UUID(bytes=first)) if first is not None else ""

    def close(self) -> None:
        self._first.close()
