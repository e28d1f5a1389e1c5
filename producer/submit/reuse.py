"""Finds the requests of a batch whose answers are known.

The digest of a body takes as long as half of its other work in a submit. So a filter passes over
the bodies that are not known:

- It has the hashes of the bodies as the workers got them, and does not find a body whose fields are
  in another order. So all lines of a short file get digests, and a few of a long one; once one of
  these is known although the filter did not find it, all lines get digests.
- After _WHOLE chunks without a known line, only every 16th line is looked at, and all lines of a
  chunk in which one of these is known.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Self

from contract.durations import duration_s
from contract.errors import RequestRejected
from contract.known import BodyFilter, Offer, answer_digest, body_hash
from contract.message import Written, args_in, read_written
from contract.redis.batches import BatchStore
from contract.redis.enqueued import Enqueued
from contract.redis.known import KnownAnswer, KnownAnswers
from contract.redis.url import LONGEST_S
from contract.settings import Settings
from producer.input.options import BadOption
from producer.input.reader import CHUNK_LINES
from producer.submit.lines import KnownLine, PreparedChunk
from producer.submit.submission import Submission

#: Seconds after which the workers' offers and the filter are read again.
_READ_AGAIN_S = 10.0
#: One of so many lines gets a digest although the filter passes over it.
_ONE_IN = 64
#: After so many chunks without a known line, only one line of _STEP is looked at.
_WHOLE, _STEP = 4, 16
#: The form of the ids of batches' requests, which ENQUEUE gets separated by spaces.
_REQUEST_ID = re.compile(r"[0-9a-f-]{36}")
#: The value of `--reuse` without a duration.
ANY_AGE = "any"


def oldest_age_s(value: object, name: str) -> float | None:
    """Return the greatest age in seconds of answers to reuse, inf for any; None if none is reused.

    Raises BadOption, with the option's `name`, for a value that is not a duration.
    """
    if value is None or value is False:
        return None
    if value is True or value == ANY_AGE:
        return math.inf
    seconds = duration_s(value) if isinstance(value, str) and len(value) <= 40 else None
    if seconds is None or not 0 < seconds <= LONGEST_S:
        raise BadOption(
            f"{name} {str(value)[:40]}: give the greatest age of an answer, for example 7d or 12h, "
            f"or {ANY_AGE}"
        )
    return seconds


@dataclass(slots=True)
class Reuse:
    """Looks for known answers of one tenant's requests, a chunk at a time, in one thread.

    With `thorough` all lines get digests, and answers whose results are gone are not found.
    """

    answers: KnownAnswers
    batch_id: str
    tenant: str
    queue: str
    oldest_s: float
    ttl_ms: int
    thorough: bool = False
    _filter: BodyFilter = field(default_factory=BodyFilter)
    _offers: dict[str, Offer | None] = field(default_factory=dict)
    _read_again_at: float = -math.inf
    #: Whether no chunk was looked up yet, and whether all lines get digests.
    _first: bool = True
    _exact: bool = False
    #: The number of chunks without a known line since the last one with one.
    _unknown: int = 0

    @classmethod
    def of(
        cls,
        store: BatchStore,
        settings: Settings,
        submission: Submission,
        *,
        thorough: bool = False,
    ) -> Self | None:
        """Return the search for a submission's requests; None if none is to be reused."""
        if submission.reuse_s is None:
            return None
        return cls(
            KnownAnswers.using(store), submission.batch_id, submission.tenant, submission.queue,
            submission.reuse_s, settings.result_ttl_ms, thorough,
        )  # fmt: skip

    def send(self, chunk: PreparedChunk, send: Callable[[], Enqueued]) -> Enqueued:
        """Find known answers, send the chunk, and note the answers as used; return the reply.

        If results are gone meanwhile, their requests are queued.
        """
        self.find(chunk)
        while (reply := send()).answer == "unknown":
            gone = set(reply.text.encode().split())
            numbers = [n for n, one in chunk.known.items() if one.written.request_id in gone]
            dropped = [chunk.known.pop(n) for n in numbers]
            self.answers.drop(self.tenant, [one.answer.digest for one in dropped])
        if reply.answer == "ok" and chunk.known:
            self._note(chunk)
        return reply

    def find(self, chunk: PreparedChunk) -> None:
        """Put the lines of a chunk whose answers are known into `chunk.known`."""
        self._read()
        count = len(chunk.messages)
        if not self._filter or not count:
            return
        if self.oldest_s < math.inf:
            oldest = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=self.oldest_s)
            chunk.oldest = oldest.isoformat().encode()
        if not chunk.queues and self._offer(self.queue) is None:
            return
        exact = self.thorough or self._exact or (self._first and count < CHUNK_LINES)
        whole = self.thorough or self._unknown < _WHOLE
        numbers = range(count) if whole else range(self._unknown % _STEP, count, _STEP)
        every = _ONE_IN if whole and not self._first else _STEP
        self._look_up(chunk, numbers, 1 if exact else every)
        if chunk.known and (not whole or (self._exact and not exact)):
            rest = [n for n in range(count) if n not in chunk.known]
            self._look_up(chunk, rest, 1 if self._exact else _ONE_IN)
        self._first = False
        self._unknown = 0 if chunk.known else self._unknown + 1

    def _look_up(self, chunk: PreparedChunk, numbers: Sequence[int], every: int) -> None:
        """Look up those of these lines that the filter finds, and one of `every` of the rest."""
        args = [args_in(chunk.messages[n]) for n in numbers]
        hashes = list(map(body_hash, args))
        likely = set(self._filter.likely(hashes))
        chosen: Collection[int] = range(len(args)) if every == 1 else sorted(likely)
        start = self._unknown % every
        # Of chunks that are not looked up whole only some have such a sample: a call takes time.
        if every == _ONE_IN or (every == _STEP and not start):
            chosen = sorted(likely.union(range(start, len(args), every)))
        lines: dict[int, tuple[str, Written]] = {}
        for at in chosen:
            written = read_written(chunk.messages[numbers[at]], args[at])
            if digest := self._digest(chunk, numbers[at], written):
                lines[at] = digest, written
        found = self.answers.find(self.tenant, [digest for digest, _ in lines.values()])
        if self.thorough:  # else ENQUEUE checks it
            found = self.answers.with_results(found)
        for (at, (digest, written)), request_id in zip(lines.items(), found, strict=True):
            if request_id and _REQUEST_ID.fullmatch(request_id):
                answer = KnownAnswer(digest, hashes[at], request_id)
                chunk.known[numbers[at]] = KnownLine(answer, written)
                self._exact |= at not in likely

    def _digest(self, chunk: PreparedChunk, n: int, written: Written) -> str:
        """Return the digest of a message's answer; '' if answers vary, or workers offer none."""
        offer = self._offer(chunk.queues[n] if chunk.queues else self.queue)
        try:
            return answer_digest(offer.identity, written.url, written.body) if offer else ""
        except RequestRejected:  # the worker reports the error
            return ""

    def _offer(self, queue: str) -> Offer | None:
        if queue not in self._offers:
            self._offers[queue] = self.answers.offer(queue)
        return self._offers[queue]

    def _read(self) -> None:
        """Read the filter, and forget the workers' offers, if both are old."""
        now = time.monotonic()
        if now >= self._read_again_at:
            self._read_again_at = now + _READ_AGAIN_S
            self._filter, self._offers = self.answers.filter(self.tenant), {}

    def _note(self, chunk: PreparedChunk) -> None:
        """Note that answers were used; the entries name the results just written."""
        used = [
            KnownAnswer(digest, number, own.request_id.decode())
            for (digest, number, _), own in chunk.known.values()
        ]
        most = min((offer.most for offer in self._offers.values() if offer), default=0)
        if most:
            self.answers.note(self.tenant, most, self.ttl_ms, used)
