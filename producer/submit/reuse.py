"""Finds the requests of a batch whose answers are known.

The digest of a body takes as long as half of its other work in a submit. So a filter passes over
the bodies that are not known:

- It has the hashes of the bodies as the workers got them, and does not find a body whose fields are
  in another order. So all lines of the first chunk get digests, and a few lines of each later one;
  once one of these is known although the filter did not find it, all lines get digests.
- After _WHOLE chunks without a known line, only every eighth line is looked at, and all lines of a
  chunk in which one of these is known.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import orjson

from contract.durations import duration_s
from contract.errors import RequestRejected
from contract.known import BodyFilter, Offer, answer_digest, body_hash
from contract.message import args_in
from contract.openai.decode import decode
from contract.redis.batches import BatchStore
from contract.redis.enqueued import Enqueued
from contract.redis.known import KnownAnswer, KnownAnswers
from contract.redis.url import LONGEST_S
from contract.settings import Settings
from producer.input.options import BadOption
from producer.submit.lines import KnownLine, PreparedChunk
from producer.submit.submission import Submission

#: Seconds after which the workers' offers and the filter are read again.
_READ_AGAIN_S = 10.0
#: One of so many lines gets a digest although the filter passes over it.
_ONE_IN = 64
#: After so many chunks without a known line, only one line of _STEP is looked at.
_WHOLE, _STEP = 4, 8
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

    With `thorough` all lines get digests.
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
    #: Whether all lines get digests: of the first chunk, and after a hit that the filter missed.
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
            gone = set(reply.text.split())
            numbers = [n for n, one in chunk.known.items() if one.request_id in gone]
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
        if self.thorough or self._unknown < _WHOLE:
            self._look_up(chunk, range(count))
        else:
            numbers = range(self._unknown % _STEP, count, _STEP)
            self._look_up(chunk, numbers)
            if chunk.known:
                self._look_up(chunk, sorted(set(range(count)).difference(numbers)))
        self._first = False
        self._unknown = 0 if chunk.known else self._unknown + 1

    def _look_up(self, chunk: PreparedChunk, numbers: Sequence[int]) -> None:
        """Look up the lines with these numbers, as far as they get digests."""
        hashes = [body_hash(args_in(chunk.messages[n])) for n in numbers]
        likely = {numbers[at] for at in self._filter.likely(hashes)}
        chosen = numbers
        if not (self.thorough or self._first or self._exact):
            chosen = sorted(likely.union(numbers[self._unknown % _ONE_IN :: _ONE_IN]))
        lines = {n: line for n in chosen if (line := self._line(chunk, n)) is not None}
        found = self.answers.find(self.tenant, [one.answer.digest for one in lines.values()])
        for (n, line), request_id in zip(lines.items(), found, strict=True):
            if _REQUEST_ID.fullmatch(request_id):
                answer = line.answer._replace(request_id=request_id)
                chunk.known[n] = line._replace(answer=answer)
                self._exact |= n not in likely

    def _line(self, chunk: PreparedChunk, n: int) -> KnownLine | None:
        """Return the line of a message with its digest, but no request; None if answers vary."""
        offer = self._offer(chunk.queues[n] if chunk.queues else self.queue)
        if offer is None:
            return None
        message = chunk.messages[n]
        headers, args = orjson.loads(message)["headers"], args_in(message)
        ours = headers["warmq"]
        try:
            body = decode(orjson.loads(args).encode())[0][0]
            digest = answer_digest(offer.identity, ours["url"], body)
        except RequestRejected:  # the worker reports the error
            return None
        if not digest:
            return None
        answer = KnownAnswer(digest, body_hash(args), "")
        return KnownLine(answer, headers["id"], ours["line"], ours["custom_id"])

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
        used = [one.answer._replace(request_id=one.request_id) for one in chunk.known.values()]
        most = min((offer.most for offer in self._offers.values() if offer), default=0)
        if most:
            self.answers.note(self.tenant, most, self.ttl_ms, used)
