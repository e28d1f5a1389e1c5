"""Estimates a file's tokens, shared prefixes, Redis memory and time before it is queued.

The file is read as submit would read it. Memory is bounded: digests of bodies and custom_ids are in
tables of fixed size, prefixes in `order.prefix_keys`.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from contract.message import MessageWriter
from contract.naming import priority_step
from contract.openai.body import LIMITS
from contract.redis.pace import Pace
from contract.settings import Settings
from producer.input.reader import RawChunk
from producer.input.seen import SeenIds
from producer.input.source import Source
from producer.submit.expected import (
    BATCH_BYTES,
    LIST_FACTOR,
    REQUEST_BYTES,
    RESULT_BYTES,
    TOKEN_BYTES,
    Answer,
    Worker,
    mean_answer,
    number,
)
from producer.submit.lines import LinesToMessages, PreparedChunk
from producer.submit.order.keys import keys_of, model_of, text_of
from producer.submit.order.prefix import UNKNOWN_CACHE_TOKENS, prefix_order
from producer.submit.order.prefix_keys import PrefixKeys
from producer.submit.prompt_tokens import TOKEN_CHARACTERS, CharacterCounter, prompt_of
from producer.submit.reuse import Reuse
from producer.submit.routes import Routes
from producer.submit.submission import Submission
from producer.time_left import Outlook, Work, own_before, requests_before

#: Most bad lines whose errors are kept, and most models whose names are.
_FIRST_BAD, _MOST_MODELS = 10, 100
#: Values for the messages whose sizes are measured; they are as long as a real batch's.
_CREATED, _LIFE, _PRIORITY = 1_700_000_000_000, "sixteen.letters.12345", 6


@dataclass(slots=True)
class Shared:
    """Prompt tokens in shared prefixes, estimated by `prefix_order`."""

    whole: int = 0  # tokens of all prompts
    repeated: int = 0  # tokens in prefixes that an earlier prompt has too
    as_is: int = 0  # those of `repeated` that are still cached in the file's order
    distinct: int = 0  # tokens of shared prefixes, each prefix counted once

    @property
    def share(self) -> float:
        """Share of the prompt tokens that a cache of unlimited size saves."""
        return self.repeated / self.whole if self.whole else 0.0


@dataclass(slots=True)
class FileContent:
    """Counts of a file's lines and tokens."""

    lines: int = 0
    requests: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    duplicates: int = 0
    known: int | None = None  # requests whose answers are known; None without --reuse
    prompt_tokens: int = 0
    estimated: int = 0  # requests whose prompt tokens are an estimate
    limits: int = 0  # sum of the answers' limits, in tokens
    without_limit: int = 0  # requests without a limit
    fixed: int = 0  # requests whose answers have exactly the length of their limit
    too_long: int = 0  # prompts that exceed the context, if both are counted and known
    first_too_long: str = ""  # line or row, and custom_id, of the first one
    expected: float = 0.0  # tokens of the answers, if they are as long as the queue's mean
    message_bytes: int = 0
    index_bytes: int = 0
    reject_bytes: int = 0
    models: set[str] = field(default_factory=set)  # names in bodies, '' for none; not all of many
    shared: Shared = field(default_factory=Shared)

    @property
    def computed(self) -> int:
        """Number of requests whose answers are not known."""
        return self.requests - (self.known or 0)

    @property
    def all_known(self) -> bool:
        """Whether there are requests, and the answers of all of them are known."""
        return bool(self.requests) and not self.computed


@dataclass(frozen=True, slots=True)
class RedisBytes:
    """Bytes in Redis before the first request runs, and with all results."""

    waiting: int
    finished: int

    @property
    def most(self) -> int:
        """Most bytes that the batch takes in Redis."""
        return max(self.waiting, self.finished)


@dataclass(frozen=True, slots=True)
class Needed:
    """What a file needs to end within `left_s`: tokens per second, slots and workers.

    `slots` and `workers` are None if a single request takes longer, or if the file takes longer on
    all slots of its tenant's cap.
    """

    left_s: float
    met: bool
    tokens_per_s: float
    slots: int | None
    workers: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The estimates for one file."""

    content: FileContent
    queue: str
    tokenizer: str  # the model whose tokenizer counted; '' for an estimate
    mean_answer: float | None  # mean tokens of the queue's answers
    kv_tokens: int | None  # tokens of the workers' smallest KV cache with prefix caching, if known
    saved_tokens: int  # prompt tokens that this cache saves
    any_order: bool  # whether the cache saves them in any order of the lines
    memory: RedisBytes
    workers: int
    pace: Pace | None  # rate of the queue's workers in their last minutes with work, if known
    before: int  # waiting requests of other batches that run before the file's end
    context: int | None  # longest context of the workers in tokens, if they announce it
    cap: float = math.inf  # most slots of the tenant
    own_before: int = 0  # requests of `before` that are the tenant's
    token_characters: float = TOKEN_CHARACTERS  # of an estimate

    @property
    def seconds(self) -> float | None:
        """Seconds at `pace` until the file and all requests before it have ended, if known."""
        if self.content.all_known:
            return 0.0
        if self.pace is None or self.pace.too_rough or self.cap <= 0:
            return None
        tokens = self.content.prompt_tokens + self.content.expected
        all_s = self.pace.ends(tokens, self.content.computed, self.before)
        return max(all_s, self.capped_s or 0.0)

    @property
    def capped_s(self) -> float | None:
        """Seconds until the tenant's requests have ended on all slots of its cap, if it has one."""
        if self.pace is None or self.cap <= 0 or math.isinf(self.cap):
            return None
        tokens = self.content.prompt_tokens + self.content.expected
        pace = replace(self.pace, slots=self.cap)
        return pace.ends(tokens, self.content.computed, self.own_before)

    def on(self, workers: int, outlook: Outlook | None, submission: Submission) -> "Plan":
        """Return the plan for so many workers with this outlook."""
        if outlook is None:
            return replace(self, workers=workers, pace=None, before=0)
        planned = replace(
            self, workers=workers, pace=outlook.pace,
            cap=outlook.caps.get(submission.tenant, math.inf),
        )  # fmt: skip
        if self.content.all_known:
            return planned
        step, requests = priority_step(submission.priority), self.content.computed
        work = Work(None, submission.tenant, step, requests)
        before, own = requests_before(outlook.lists, work), own_before(outlook.lists, work)
        return replace(planned, before=before, own_before=own)

    def needed(self, left_s: float) -> Needed | None:
        """Return what the file needs to end within `left_s`; None if the pace is not known."""
        if self.content.all_known:
            return Needed(left_s, True, 0.0, 0, 0)
        if self.pace is None or self.seconds is None or not self.content.requests:
            return None
        tokens = self.content.prompt_tokens + self.content.expected
        rate = (tokens + self.before * self.pace.of_request) / left_s
        slots = workers = None
        alone_s = tokens / self.content.computed / self.pace.of_slot
        if max(alone_s, self.capped_s or 0.0) <= left_s:
            most = self.content.computed + self.before  # each of them has a slot
            slots = min(most, max(1, math.ceil(rate / self.pace.of_slot)))
            workers = math.ceil(slots * max(1, self.workers) / self.pace.slots)
        return Needed(left_s, self.seconds <= left_s, rate, slots, workers)


def plan(
    settings: Settings,
    submission: Submission,
    source: Source,
    counter: CharacterCounter,
    workers: Sequence[Worker] = (),
    outlook: Outlook | None = None,
    report: Callable[[FileContent], None] = lambda content: None,
    watch: Callable[[Iterator[RawChunk]], Iterator[RawChunk]] = iter,
    reuse: Reuse | None = None,
) -> Plan:
    """Read a source to its end, close it, and return its plan.

    `counter` counts prompt tokens; `workers` are the announcements of the queue's workers (the
    states that they write to Redis), `outlook` has their rate and the waiting lists. `report` is
    called after each chunk with the counts so far. `watch` gets the chunks and yields them
    unchanged. `reuse` finds known answers, whose requests take no tokens.
    """
    mean, cache = mean_answer(workers), kv_tokens(workers)
    assumed_cache = UNKNOWN_CACHE_TOKENS if cache is None else cache
    context = int(max((number(worker.get("max_model_len")) for worker in workers), default=0))
    reader = _FileReader(settings, submission, counter, mean, context, reuse)
    try:
        content = reader.read(
            watch(source.chunks(submission.seed, settings.max_line_bytes)), assumed_cache, report
        )
    finally:
        source.close()
    saved, any_order = saved_tokens(content, cache)
    own = BATCH_BYTES + content.index_bytes + content.bad * RESULT_BYTES // 2 + content.reject_bytes
    waiting = round(content.message_bytes * LIST_FACTOR) + REQUEST_BYTES * content.computed
    results = RESULT_BYTES * content.requests + round(TOKEN_BYTES * content.expected)
    planned = Plan(
        content, submission.queue, counter.name, mean, cache, saved, any_order,
        RedisBytes(own + waiting, own + results), 0, None, 0, context or None,
        token_characters=counter.token_characters,
    )  # fmt: skip
    return planned.on(len(workers), outlook, submission)


def queues_of(submission: Submission, content: FileContent) -> list[str]:
    """Return the queues to which a file's requests go."""
    base, routes = submission.queue, submission.routes
    names = content.models if routes else ()
    return sorted({routes.get(model, base) for model in names}) or [base]


def kv_tokens(workers: Sequence[Worker]) -> int | None:
    """Return the tokens of the smallest KV cache with prefix caching; None if unknown."""
    sharing = [worker for worker in workers if worker.get("prefix_caching") is True]
    return int(min((number(worker.get("kv_tokens")) for worker in sharing), default=0)) or None


def saved_tokens(content: FileContent, cache: int | None) -> tuple[int, bool]:
    """Return the prompt tokens that the smallest KV cache saves, and whether in any order."""
    if cache is None or not content.shared.whole:
        return 0, True
    tokens_each = content.prompt_tokens / content.shared.whole
    fits = content.shared.distinct * tokens_each <= cache / 2  # running answers need the rest
    return round(content.shared.share * content.prompt_tokens), fits


class _FileReader:
    """Reads one file, and counts its content.

    `mean_answer` is the mean of the queue's answers in tokens, if known. `context` is the workers'
    longest context in tokens, 0 if unknown.
    """

    def __init__(
        self,
        settings: Settings,
        submission: Submission,
        counter: CharacterCounter,
        mean_answer: float | None,
        context: int,
        reuse: Reuse | None = None,
    ) -> None:
        self._content = FileContent(known=None if reuse is None else 0)
        self._reuse = reuse
        self._context = context
        self._counter, self._mean_answer = counter, mean_answer
        self._routes = Routes(submission.routes, submission.queue) if submission.routes else None
        self._ids, self._bodies = SeenIds(), SeenIds()
        self._records = PrefixKeys()
        writer = MessageWriter("plan", _CREATED, _LIFE, submission.queue, _PRIORITY)
        self._lines = LinesToMessages(
            "plan",
            writer,
            submission.overrides,
            settings.max_line_bytes,
            self._ids,
            keep_requests=True,
            keep_columns=bool(submission.keep),
            check=self._routes.check if self._routes else None,
        )

    def read(
        self,
        raw_chunks: Iterator[RawChunk],
        cache: int,
        report: Callable[[FileContent], None],
    ) -> FileContent:
        """Read the file to its end; `cache` is the size of the prefix cache in tokens."""
        content = self._content
        with closing(self._records):
            with closing(self._ids), closing(self._bodies):  # the order needs their memory
                for raw in raw_chunks:
                    of_table = raw.explain is not None
                    self._add_chunk(self._lines.prepare(raw, (0, "")), of_table=of_table)
                    content.lines = raw.cursor
                    report(content)
            found = prefix_order(self._records, cache)
        content.shared = Shared(found.prompt, found.saved, found.saved_as_is, found.distinct)
        return content

    def _add_chunk(self, chunk: PreparedChunk, *, of_table: bool) -> None:
        content = self._content
        content.requests += len(chunk.bodies)
        content.bad += len(chunk.rejects)
        content.without_limit += chunk.without_limit
        if self._reuse is not None and content.known is not None:
            if self._routes:
                chunk.queues = [self._routes.queue_of(request) for request in chunk.requests]
            self._reuse.find(chunk)
            content.known += len(chunk.known)
        own = [n for n in range(len(chunk.bodies)) if n not in chunk.known]
        content.message_bytes += sum(len(chunk.messages[n]) for n in own)
        content.index_bytes += len(chunk.index.dump()) + len(chunk.columns)
        for _, meta in chunk.rejects:
            content.reject_bytes += len(meta)
            if len(content.first_bad) < _FIRST_BAD:
                content.first_bad.append(orjson.loads(meta)["warmq"]["error"]["message"])
        raws = chunk.bodies
        texts = [text_of(*raws[n]) for n in own]
        self._records.add(*keys_of(texts), (model_of(raws[n][1]) for n in own))
        bodies: list[tuple[str, dict[str, Any]]]
        bodies = [(url, orjson.loads(raw)) for url, raw in raws]
        prompts = [prompt_of(url, body, self._counter.chat) for url, body in bodies]
        counts = self._counter.count(prompts)
        for n, ((url, body), prompt, count) in enumerate(zip(bodies, prompts, counts, strict=True)):
            canonical = orjson.dumps([url, body], option=orjson.OPT_SORT_KEYS)
            content.duplicates += not self._bodies.add(
                hashlib.blake2b(canonical, digest_size=16).hexdigest()
            )
            if n in chunk.known:
                continue
            content.prompt_tokens += count
            content.estimated += not (exact := self._counter.exact(prompt))
            if exact and len(prompt.texts) == 1 and count > self._context > 0:
                self._add_too_long(chunk.messages[n], "row" if of_table else "line")
            if len(content.models) < _MOST_MODELS:
                content.models.add(model if isinstance(model := body.get("model"), str) else "")
            if url in LIMITS:
                self._add_answer(url, body)

    def _add_too_long(self, message: bytes, what: str) -> None:
        if not self._content.too_long:
            found = orjson.loads(message)["headers"]["warmq"]
            self._content.first_too_long = f"{what} {found['line']} ({found['custom_id']})"
        self._content.too_long += 1

    def _add_answer(self, url: str, body: dict[str, Any]) -> None:
        content, answer = self._content, Answer.of(url, body)
        content.fixed += answer.fixed
        content.limits += answer.choices * answer.limit
        content.expected += answer.tokens(self._mean_answer)
