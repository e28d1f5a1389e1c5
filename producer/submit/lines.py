"""Turns a file's lines into messages, and each bad line into an error result of its own.

With `once`, lines of a batch that ask the same question have one message, the first line's.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from contract import naming
from contract.errors import RequestRejected
from contract.index import IndexChunk, IndexEntry, leader_of
from contract.message import MessageWriter
from contract.openai.body import LIMITS
from contract.openai.decode import decode
from contract.openai.lines import Request, parse_line
from contract.results import failure_meta
from producer.input.reader import RawChunk
from producer.input.seen import IN_MEMORY, KeyTable, SeenIds


@dataclass(slots=True)
class PreparedChunk:
    """One chunk, ready to send: `before` is the cursor and digest it follows.

    `identical` of its requests have no message, for an earlier line's answers them;
    `without_limit` of its requests name no max_tokens; `ignored` counts the lines with each field
    that means nothing here; `first_error` is its first bad line's. Where the order is planned,
    `bodies` has the url and body of each message until the messages are taken out: then they are
    `announced`.
    """

    ordinal: int
    first: int
    before: tuple[int, str]
    index: IndexChunk
    messages: list[bytes] = field(default_factory=list)
    bodies: list[tuple[str, bytes]] = field(default_factory=list)
    announced: int = 0
    rejects: list[tuple[str, bytes]] = field(default_factory=list)
    identical: int = 0
    without_limit: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    first_error: str = ""


@dataclass(frozen=True, slots=True)
class LinesToMessages:
    """Checks the lines of one file and writes their messages.

    custom_ids are remembered in `seen` as requests of this batch, or of the batch `whole`, of which
    this one is a part; without `seen` it is known that none is repeated. With `leaders`, a body
    that was met before gets no message. With `keep_bodies` the chunks have their messages' bodies,
    too. `check` may refuse a valid request by raising RequestRejected.
    """

    batch_id: str
    writer: MessageWriter
    overrides: dict[str, Any]
    max_line_bytes: int
    seen: SeenIds | None
    whole: str = ""
    leaders: Leaders | None = None
    keep_bodies: bool = False
    check: Callable[[Request], None] | None = None

    def first_use(self, custom_id: str, request_id: str) -> bool:
        """Remember a custom_id; return whether no earlier line had it."""
        if self.seen is None:
            return True
        whole = self.whole
        return self.seen.add(naming.request_id(whole, custom_id) if whole else request_id)

    def prepare(self, raw: RawChunk, before: tuple[int, str]) -> PreparedChunk:
        """Validate a chunk's lines and write their messages; takes the lines out of it."""
        batch_id, overrides = self.batch_id, self.overrides
        entries: list[IndexEntry] = []
        index = IndexChunk(raw.cursor, raw.digest, entries)
        chunk = PreparedChunk(raw.ordinal, raw.first, before, index)
        write, first_use, leaders = self.writer.write, self.first_use, self.leaders
        check = self.check
        raw.lines.reverse()
        while raw.lines:
            number, line = raw.lines.pop()  # a line's bytes go as soon as its message is there
            custom_id = None
            try:
                if number in raw.too_long:
                    raise self._too_long(raw.too_long[number])
                request = parse_line(line, overrides)
                custom_id = request.custom_id
                if check is not None:
                    check(request)
                if custom_id is None:
                    request_id, by_line = naming.line_request_id(batch_id, number), True
                    custom_id = f"line-{number}"
                else:
                    request_id, by_line = naming.request_id(batch_id, custom_id), False
                    if not first_use(custom_id, request_id):
                        raise _duplicate(custom_id)
            except RequestRejected as error:
                error.custom_id = error.custom_id or custom_id
                self._reject(chunk, number, (raw.explain or in_line)(number, line, error))
                continue
            chunk.without_limit += not request.limited
            if request.ignored:
                chunk.ignored.update(request.ignored)
            if leaders and (leader := leaders.of(request, request_id)):
                entries.append((number, custom_id, by_line, leader))
                chunk.identical += 1
                continue
            entries.append((number, custom_id, by_line))
            message = write(
                request_id, custom_id, number, request.url, request.body, request.sequences
            )
            chunk.messages.append(message)
            if self.keep_bodies:
                chunk.bodies.append((request.url, request.body))
        return chunk

    def take_stored(self, raw: RawChunk, kept: IndexChunk) -> None:
        """Remember the custom_ids of a chunk that was queued before, and its leaders."""
        lines = zip(raw.lines, kept.entries, kept.request_ids(self.batch_id), strict=True)
        for (_, line), entry, request_id in lines:
            _, custom_id, by_line = entry[:3]
            if not by_line:
                self.first_use(custom_id, request_id)
            if self.leaders and not leader_of(entry):
                with suppress(RequestRejected):  # a bad line leads nobody
                    request = parse_line(line, self.overrides)
                    if by_line == (request.custom_id is None):  # else its custom_id was repeated
                        self.leaders.of(request, request_id)

    def _reject(self, chunk: PreparedChunk, number: int, error: RequestRejected) -> None:
        """Give a bad line its error result."""
        batch_id, custom_id = self.batch_id, error.custom_id
        by_line, request_id = True, naming.line_request_id(batch_id, number)
        if custom_id is None:
            custom_id = f"line-{number}"
        elif error.code != "duplicate_custom_id":
            own = naming.request_id(batch_id, custom_id)
            if self.first_use(custom_id, own):
                by_line, request_id = False, own
        meta = failure_meta(request_id, error, batch=batch_id, custom_id=custom_id, line=number)
        chunk.index.entries.append((number, custom_id, by_line))
        chunk.rejects.append((request_id, meta))
        chunk.first_error = chunk.first_error or error.message

    def _too_long(self, size: int) -> RequestRejected:
        limit = self.max_line_bytes
        return RequestRejected(
            f"longer than {limit} bytes (it has {size}); shorten it, or raise WARMQ_MAX_LINE_BYTES",
            code="line_too_long",
        )


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
        f"field custom_id: {custom_id!r} was used by an earlier line; make it unique",
        code="duplicate_custom_id",
        field="custom_id",
        custom_id=custom_id,
    )


_KEY_BYTES = 16
#: Fields that change when an answer comes, or under whose name, and never the answer.
_NOT_ASKED = frozenset(("user", "session_id", "priority", "stream"))
#: Fields that let an answer depend on more than the body where they are neither null nor false: a
#: search over several texts, a mark drawn from a key, arguments of plugins, and key-value caches
#: that another engine holds and may give only once.
_DEPENDS = (
    "use_beam_search", "watermarking", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"
)  # fmt: skip


def dedupe_key(url: str, text: bytes) -> bytes | None:
    """Return a key that two requests share if one's answer answers the other; None for a request
    whose answer may differ when it is asked again.

    `text` is a valid body's JSON. An answer is repeatable where the body alone decides it:

    - A generated text must be greedy, which is temperature 0, in the line or set for all: without
      a temperature the model's own default counts, which mostly samples. vLLM then looks neither
      at `seed` nor at `top_p`, `top_k` and `min_p` (SamplingParams.__post_init__).
    - One text, n = 1; vLLM refuses more that are greedy.
    - Nothing else it depends on may be asked for (_DEPENDS), nor media by address: what is there
      may change, and uuids of media name what an engine has seen before.
    - Pooling models (embeddings, scores, rerankings) draw nothing at random.

    Bodies are the same with the same fields, whatever their order. What a field holds is compared
    as it is written: a template or a grammar may follow the order of a tool's or a schema's
    properties.
    """
    try:
        body: dict[str, Any] = decode(text)
    except RequestRejected:  # the worker decodes it so, too, and says what is wrong
        return None
    if url in LIMITS and (body.get("temperature") != 0 or body.get("n") not in (None, 1)):
        return None
    if any(body.get(name) not in (None, False) for name in _DEPENDS):
        return None
    asked = {name: body[name] for name in sorted(body.keys() - _NOT_ASKED)}
    canonical = orjson.dumps(asked)
    if b'_url"' in canonical and _by_address(asked):
        return None
    return hashlib.blake2b(url.encode() + b"\0" + canonical, digest_size=_KEY_BYTES).digest()


def _by_address(asked: dict[str, Any]) -> bool:
    """Whether a part of a body gives a medium by anything but its content (a `data:` URL)."""
    waiting: list[Any] = [asked]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            for name in value:
                medium = value[name] if name.endswith("_url") else "data:"
                url = medium.get("url") if isinstance(medium, dict) else medium
                if not (isinstance(url, str) and url.startswith("data:")):
                    return True
    return False


class Leaders:
    """The first line of each question of one batch, in constant memory."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._first = KeyTable(_KEY_BYTES, in_memory, "questions")

    def of(self, request: Request, request_id: str) -> str:
        """Return the request id of the line that asked the same before, '' for the first one,
        which is remembered, and for one that is not repeatable.

        Raises:
            WriteFailed: there is no room for it on disk.
        """
        key = dedupe_key(request.url, request.body)
        if key is None:
            return ""
        first = self._first.put(key, bytes.fromhex(request_id.replace("-", "")))
        return str(uuid.UUID(bytes=first)) if first is not None else ""

    def close(self) -> None:
        """Give memory and file back."""
        self._first.close()
