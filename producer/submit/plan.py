"""What a file will take before anything of it is queued: tokens, shared beginnings, Redis, time.

The file is read as submit would read it. Bodies and custom_ids are remembered in tables of fixed
size, beginnings as order/ does it.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import orjson

from contract.message import MessageWriter
from contract.openai.body import LIMITS
from contract.settings import Settings
from producer.input.reader import RawChunk
from producer.input.seen import SeenIds
from producer.input.source import Source
from producer.submit.expected import (
    BATCH,
    LIST,
    RESULT,
    TOKEN,
    WAITING,
    Worker,
    mean_answer,
    number,
)
from producer.submit.lines import LinesToMessages, PreparedChunk
from producer.submit.order.keys import keys_of, text_of
from producer.submit.order.prefix import UNKNOWN_CACHE_TOKENS
from producer.submit.order.prefix import plan as plan_order
from producer.submit.order.records import Records
from producer.submit.prompt_tokens import CharacterCounter, Prompt, prompt_of
from producer.submit.submission import Submission
from producer.time_left import Pace

#: Bad lines that are told, as submit would tell them.
TOLD = 10
#: As long as those of a real batch, for the sizes of messages.
_CREATED, _LIFE = 1_700_000_000_000, "sixteen.letters.12345"


@dataclass(slots=True)
class Shared:
    """Beginnings that prompts share, in tokens as `order.plan` estimates them.

    `whole` is that of all prompts; `repeated` are those that an earlier prompt has begun with,
    `as_is` those of them that stay in the cache in the file's own order, `distinct` the shared
    beginnings, each once.
    """

    whole: int = 0
    repeated: int = 0
    as_is: int = 0
    distinct: int = 0

    @property
    def share(self) -> float:
        """The share of the prompts that need not be computed if the cache keeps it all."""
        return self.repeated / self.whole if self.whole else 0.0


@dataclass(slots=True)
class FileContent:
    """What was found. `estimated` requests have an estimated number of prompt tokens.

    `limits` is the sum of what their answers may have at most, in tokens; `without_limit` requests
    name none. `fixed` ones will be that long. `expected` are the tokens to be written if answers
    are as long as the queue's on average.
    """

    lines: int = 0
    requests: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    duplicates: int = 0
    prompt_tokens: int = 0
    estimated: int = 0
    limits: int = 0
    without_limit: int = 0
    fixed: int = 0
    expected: float = 0.0
    message_bytes: int = 0
    index_bytes: int = 0
    reject_bytes: int = 0
    shared: Shared = field(default_factory=Shared)


@dataclass(frozen=True, slots=True)
class RedisBytes:
    """`waiting` before the first request runs, `finished` when the last has ended and no result is
    collected, `most` in between."""

    waiting: int
    finished: int

    @property
    def most(self) -> int:
        """What Redis must have room for."""
        return max(self.waiting, self.finished)


def redis_bytes(content: FileContent) -> RedisBytes:
    """Return what Redis needs for a file that is submitted whole."""
    kept = BATCH + content.index_bytes + content.bad * RESULT // 2 + content.reject_bytes
    waiting = round(content.message_bytes * LIST) + WAITING * content.requests
    results = RESULT * content.requests + round(TOKEN * content.expected)
    return RedisBytes(kept + waiting, kept + results)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a file before it is queued.

    `tokenizer` is the model whose tokenizer counted, '' for an estimate; `mean_answer` the tokens
    of the queue's answers on average, None if none has ended; `kv_tokens` the smallest KV cache
    that shares prompts, None if none does or it is not known; `saved_tokens` what it saves of the
    prompts, in any order of the file if `any_order`; `pace` at what rate the queue's workers did
    their last work, None if they have done none.
    """

    content: FileContent
    queue: str
    tokenizer: str
    mean_answer: float | None
    kv_tokens: int | None
    saved_tokens: int
    any_order: bool
    memory: RedisBytes
    workers: int
    pace: Pace | None

    @property
    def seconds(self) -> float | None:
        """How long it takes at that rate, if nothing else runs; None if that is not known."""
        tokens = self.content.prompt_tokens + self.content.expected
        return self.pace.seconds(tokens, self.content.requests) if self.pace else None


def plan(
    settings: Settings,
    submission: Submission,
    source: Source,
    counter: CharacterCounter,
    workers: Sequence[Worker] = (),
    pace: Pace | None = None,
    report: Callable[[FileContent], None] = lambda content: None,
) -> Plan:
    """Read a file to its end and return its plan; closes it.

    Args:
        submission: how it would be submitted.
        counter: counts the tokens of its prompts.
        workers: the announcements of the workers that would take it.
        pace: at what rate they work.
        report: called with what was found so far, after each chunk.

    Raises:
        InputUnreadable: for damaged input.
    """
    usual, cache = mean_answer(workers), kv_tokens(workers)
    reader = FileReader(settings, submission.queue, submission.overrides, counter, usual, cache)
    try:
        raw = source.chunks(submission.seed, settings.max_line_bytes)
        content = reader.read(raw, report)
    finally:
        source.close()
    saved, any_order = saved_tokens(content, cache)
    return Plan(
        content, submission.queue, counter.name, usual, cache, saved, any_order,
        redis_bytes(content), len(workers), pace,
    )  # fmt: skip


def kv_tokens(workers: Sequence[Worker]) -> int | None:
    """Return the size of the smallest KV cache that shares prompts; None where none is known."""
    sharing = [worker for worker in workers if worker.get("prefix_caching") is True]
    return int(min((number(worker.get("kv_tokens")) for worker in sharing), default=0)) or None


def saved_tokens(content: FileContent, cache: int | None) -> tuple[int, bool]:
    """Return the prompt tokens that the smallest KV cache can save, and whether it does so in any
    order: the shared beginnings fit into it."""
    if cache is None or not content.shared.whole:
        return 0, True
    tokens_each = content.prompt_tokens / content.shared.whole
    fits = content.shared.distinct * tokens_each <= cache / 2  # running answers need the rest
    return round(content.shared.share * content.prompt_tokens), fits


class _Look(MessageWriter):
    """Writes messages as submit would, and shows each request to `look`."""

    def __init__(self, look: Callable[[str, bytes], None], batch_id: str, queue: str) -> None:
        super().__init__(batch_id, _CREATED, _LIFE, queue, 6)
        self._look = look

    def write(
        self,
        request_id: str,
        custom_id: str | None,
        line: int,
        url: str,
        body: bytes,
        sequences: int = 1,
    ) -> bytes:
        """Return one message."""
        self._look(url, body)
        return super().write(request_id, custom_id, line, url, body, sequences)


class FileReader:
    """Reads one file.

    Args:
        overrides: body fields that replace those of every line.
        counter: counts the tokens of prompts.
        mean_answer: tokens of the queue's answers on average; None if nobody knows.
        cache: tokens that the workers' prefix caches hold; None if nobody knows.
    """

    def __init__(
        self,
        settings: Settings,
        queue: str,
        overrides: dict[str, Any],
        counter: CharacterCounter,
        mean_answer: float | None,
        cache: int | None = None,
        batch_id: str = "plan",
    ) -> None:
        self.content = FileContent()
        self._counter = counter
        self._mean = mean_answer
        self._bodies: list[tuple[str, dict[str, Any]]] = []
        self._ids, self._same = SeenIds(), SeenIds()
        self._cache = UNKNOWN_CACHE_TOKENS if cache is None else cache
        self._texts: list[list[bytes]] = []
        self._records = Records()
        self._lines = LinesToMessages(
            batch_id,
            _Look(self._look, batch_id, queue),
            overrides,
            settings.max_line_bytes,
            self._ids,
        )

    def read(
        self, raw_chunks: Iterator[RawChunk], report: Callable[[FileContent], None]
    ) -> FileContent:
        """Read to the end; `report` is called now and then with what was found so far.

        Raises:
            InputUnreadable: for damaged input.
        """
        with closing(self._records):
            with closing(self._ids), closing(self._same):  # the plan needs their memory
                for raw in raw_chunks:
                    self._take(self._lines.prepare(raw, (0, "")))
                    self.content.lines = raw.cursor
                    report(self.content)
            found = plan_order(self._records, self._cache)
        self.content.shared = Shared(found.prompt, found.saved, found.saved_as_is, found.distinct)
        return self.content

    def _look(self, url: str, raw: bytes) -> None:
        body = orjson.loads(raw)
        self._bodies.append((url, body))
        self._texts.append(text_of(url, raw))
        same = orjson.dumps([url, body], option=orjson.OPT_SORT_KEYS)
        new = self._same.add(hashlib.blake2b(same, digest_size=16).hexdigest())
        self.content.duplicates += not new

    def _take(self, chunk: PreparedChunk) -> None:
        content, bodies = self.content, self._bodies
        content.requests += len(bodies)
        content.bad += len(chunk.rejects)
        content.without_limit += chunk.without_limit
        content.message_bytes += sum(map(len, chunk.messages))
        content.index_bytes += len(chunk.index.dump())
        for _, meta in chunk.rejects:
            content.reject_bytes += len(meta)
            if len(content.first_bad) < TOLD:
                content.first_bad.append(orjson.loads(meta)["warmq"]["error"]["message"])
        prompts = [prompt_of(url, body, self._counter.chat) for url, body in bodies]
        counts = self._counter.count(prompts)
        for (url, body), prompt, count in zip(bodies, prompts, counts, strict=True):
            self._add(url, body, prompt, count)
        bodies.clear()
        self._records.add(*keys_of(self._texts))
        self._texts.clear()

    def _add(self, url: str, body: dict[str, Any], prompt: Prompt, count: int) -> None:
        content = self.content
        content.prompt_tokens += count
        content.estimated += not self._counter.exact(prompt)
        if url not in LIMITS:
            return
        choices = body.get("n") or 1
        limit = next((body[name] for name in reversed(LIMITS[url]) if body.get(name)), None)
        fixed = limit is not None and (body.get("ignore_eos") or body.get("min_tokens") == limit)
        content.fixed += bool(fixed)
        content.limits += choices * (limit or 0)
        usual = limit if fixed or self._mean is None else min(self._mean, limit or self._mean)
        content.expected += choices * (usual or 0)
