"""Estimates a batch's tokens and time from a sample of its requests, and its Redis memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import orjson

from contract.openai.body import LIMITS
from contract.openai.prompts import MESSAGE_TOKENS
from producer.submit.prompt_tokens import (
    TOKEN_CHARACTERS,
    CharacterCounter,
    prompt_of,
    token_characters,
)
from producer.time_left import Outlook, Work

#: Bytes in Redis, measured on 6.2. REQUEST_BYTES: a queued request without its message.
#: RESULT_BYTES: a result without its answer's text (690 for vLLM's fields, 250 for the envelope and
#: times, 240 for the key, Redis's own data, and the id in the list of finished requests).
#: TOKEN_BYTES: one token of the answer's text, on average.
REQUEST_BYTES, RESULT_BYTES, TOKEN_BYTES = 16, 1180, 4
#: Size of a list in Redis divided by the size of its messages (test_plan.py checks it to 10 %).
LIST_FACTOR = 1.03
#: Bytes in Redis of a batch's own keys.
BATCH_BYTES = 4096
#: The estimate counts all requests until it has read so many bytes of bodies, then one in EVERY.
WHOLE_BYTES, EVERY = 2**17, 64

Worker = dict[str, Any]


def ignore(_url: str, _body: bytes) -> None:
    """Count nothing, where no sample is taken."""


class Answer(NamedTuple):
    """The number of a request's choices, and the most tokens of each, 0 for no limit.

    `fixed`: each choice has exactly `limit` tokens.
    """

    choices: int
    limit: int
    fixed: bool

    @classmethod
    def of(cls, url: str, body: dict[str, Any]) -> Self:
        """Return what a body asks for."""
        limit = next((body[name] for name in reversed(LIMITS[url]) if body.get(name)), 0)
        fixed = bool(limit and (body.get("ignore_eos") or body.get("min_tokens") == limit))
        return cls(body.get("n") or 1, limit, fixed)

    def tokens(self, mean: float | None) -> float:
        """Return the expected tokens, if answers have `mean` tokens on average."""
        each = self.limit if self.fixed or mean is None else min(mean, self.limit or mean)
        return self.choices * each


@dataclass(slots=True)
class Sample:
    """Estimates the tokens of requests from some of them, as a plan without a tokenizer does."""

    requests: int = 0
    _bytes: int = 0
    #: Number of requests for which the counted ones stand; the tokens of their texts at
    #: TOKEN_CHARACTERS each; their other tokens; their answers.
    _weight: int = 0
    _text: int = 0
    _other: int = 0
    _answers: Counter[Answer] = field(default_factory=Counter)

    def add(self, url: str, raw: bytes) -> None:
        """Add a request with its body's JSON."""
        self.requests += 1
        if self._bytes < WHOLE_BYTES:
            self._count(url, raw, 1)
        elif not self.requests % EVERY:
            self._count(url, raw, EVERY)

    def _count(self, url: str, raw: bytes, weight: int) -> None:
        self._bytes += len(raw)
        self._weight += weight
        body, counter = orjson.loads(raw), CharacterCounter()
        prompt = prompt_of(url, body, counter.chat)
        (tokens,) = counter.count([prompt])
        fixed = prompt.ids + MESSAGE_TOKENS * prompt.messages if prompt.most is None else tokens
        self._text += weight * (tokens - fixed)
        self._other += weight * fixed
        if url in LIMITS:
            self._answers[Answer.of(url, body)] += weight

    def tokens(self, requests: int, workers: Sequence[Worker]) -> tuple[int, int]:
        """Return the prompt and completion tokens of so many requests at these workers."""
        mean = mean_answer(workers)
        measured = token_characters(workers) or TOKEN_CHARACTERS
        prompt = self._other + self._text * TOKEN_CHARACTERS / measured
        each = requests / max(1, self._weight)
        written = sum(weight * answer.tokens(mean) for answer, weight in self._answers.items())
        return round(each * prompt), round(each * written)


def expected(
    sample: Sample, work: Work, workers: Sequence[Worker], outlook: Outlook | None
) -> bytes:
    """Return a batch's expected load as JSON, for its hash in Redis; b'' without a sample.

    The JSON has `prompt_tokens`, `completion_tokens` (null if no worker has answered a request yet)
    and `seconds` (null also if the pace is unknown or too rough). If no request is left to compute,
    all are 0.
    """
    if not sample.requests:
        return b""
    requests, usual = work.left, mean_answer(workers)
    if not requests:
        return orjson.dumps({"prompt_tokens": 0, "completion_tokens": 0, "seconds": 0.0})
    prompt, written = sample.tokens(requests, workers)
    seconds = None
    if outlook is not None and usual is not None and not outlook.pace.too_rough:
        left_s = outlook.seconds(prompt + written, work)
        seconds = None if left_s is None else round(left_s, 1)
    return orjson.dumps({
        "prompt_tokens": prompt, "completion_tokens": None if usual is None else written,
        "seconds": seconds,
    })  # fmt: skip


def least_result_bytes(requests: int) -> int:
    """Return the bytes in Redis of `requests` results if all their answers were empty."""
    return BATCH_BYTES + RESULT_BYTES * requests


def mean_answer(workers: Sequence[Worker]) -> float | None:
    """Return the mean tokens of the workers' answers; None if none has answered yet."""
    known = list(filter(None, (number(worker.get("mean_answer")) for worker in workers)))
    return sum(known) / len(known) if known else None


def number(value: object) -> float:
    """Return a value of an announcement if it is a positive number, otherwise 0."""
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
