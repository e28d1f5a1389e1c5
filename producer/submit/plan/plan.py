"""Plans a file: what it holds, and what that takes of Redis and of the workers announced now."""

from collections.abc import Callable
from dataclasses import dataclass

from contract.settings import Settings
from producer.input.source import Source
from producer.submit.plan.content import FileContent
from producer.submit.plan.duration import (
    Duration,
    Worker,
    duration,
    kv_tokens,
    mean_answer,
    saved_tokens,
)
from producer.submit.plan.memory import RedisBytes, redis_bytes
from producer.submit.plan.reading import FileReader
from producer.submit.plan.tokens import Estimate
from producer.submit.submission import Submission


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a file before it is queued.

    `tokenizer` is the model whose tokenizer counted, '' for an estimate; `mean_answer` the tokens
    of the queue's answers on average, None if none has ended; `kv_tokens` the smallest KV cache
    that shares prompts, None if none does or it is not known; `saved_tokens` what it saves of the
    prompts, in any order of the file if `any_order`; `duration` None if no worker has measured.
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
    duration: Duration | None


def plan(
    settings: Settings,
    submission: Submission,
    source: Source,
    counter: Estimate,
    workers: list[Worker],
    report: Callable[[FileContent], None] = lambda content: None,
) -> Plan:
    """Read a file to its end and return its plan; closes it.

    Args:
        submission: how it would be submitted.
        counter: counts the tokens of its prompts.
        workers: the announcements of the workers that would take it.
        report: called with what was found so far, after each chunk.

    Raises:
        InputUnreadable: for damaged input.
    """
    usual = mean_answer(workers)
    cache = kv_tokens(workers)
    reader = FileReader(settings, submission.queue, submission.overrides, counter, usual, cache)
    try:
        raw = source.chunks(submission.seed, settings.max_line_bytes)
        content = reader.read(raw, report)
    finally:
        source.close()
    saved, any_order = saved_tokens(content, workers)
    return Plan(
        content, submission.queue, counter.name, usual, cache, saved, any_order,
        redis_bytes(content), len(workers), duration(content, workers),
    )  # fmt: skip
