"""Runs a spread of a file's rows now, before the whole file is submitted.

The rows become a separate batch with the highest priority, which is removed afterwards. If this
process is killed before, the batch ends without it: requests that have not run within LIFE_MS
expire, and KEEP_MS after its end Redis removes the batch.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Self

import orjson

from contract.batch import Batch
from contract.errors import BatchConflict, RequestRejected
from contract.openai.lines import parse_line
from contract.openai.prompts import prompt_text
from contract.redis.batches import BatchStore
from contract.results import ResultLine
from contract.settings import Settings
from producer.collect.answers import finish_reason_of, text_of, tokens_of
from producer.collect.collect import Collector
from producer.input.reader import ExplainError, RawChunk
from producer.input.tables.kept import split_kept
from producer.submit.prompt_tokens import CharacterCounter, prompt_of
from producer.submit.submission import Submission
from producer.submit.submit import Submitter

if TYPE_CHECKING:  # the module loads numpy, which takes 0.1 s
    from producer.submit.plan import Plan

#: Most rows of a trial, and their usual number.
MOST_ROWS, ROWS = 100, 20
#: Milliseconds within which a trial's requests must end, and for which its results are kept.
LIFE_MS, KEEP_MS = 3_600_000, 600_000
#: The highest priority.
_PRIORITY = 0
#: Most characters shown of a line that is not a request.
_LINE_CHARACTERS = 2_000
#: Number, bytes and size (if it is too long) of a line.
_Line = tuple[int, bytes, int | None]


@dataclass(frozen=True, slots=True)
class TriedRow:
    """One row of a trial: the prompt, and the answer or the error.

    `line` is its number in the file. `prompt` is the line itself if it is not a valid request, ''
    if a table's row has none. The fields of the answer are None if there is none, those of the
    error if there is an answer.
    """

    line: int
    custom_id: str
    prompt: str
    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    #: Prompt tokens as CharacterCounter estimates them; 0 for a bad line.
    estimated_tokens: int = 0

    @property
    def ok(self) -> bool:
        """Whether there is an answer."""
        return self.error_code is None


def _random() -> Random:
    """Return the same random numbers each time, so that a file always gives the same rows."""
    return Random(0)  # noqa: S311


def _one_of_each(lines: list[_Line], groups: int, random: Random) -> list[_Line]:
    """Divide lines into groups of neighbours; return one line of each.

    It is the first line of the first group, and a random line of any other group.
    """
    bounds = [n * len(lines) // max(1, groups) for n in range(groups + 1)]
    return [lines[random.randrange(a, b) if a else 0] for a, b in pairwise(bounds)]


@dataclass(slots=True)
class Spread:
    """Chooses rows that are spread over a file of unknown length, which is read once.

    A random line of each block of `_step` lines is kept, because in many files every second or
    fourth line is of one kind. The first line of the first block is kept. When twice as many lines
    as needed are kept, one of each two is dropped at random, and `_step` doubles. The same file
    always gives the same rows.
    """

    rows: int = ROWS
    _kept: list[_Line] = field(default_factory=list)
    #: The explanation of errors of rows; None for lines.
    explain: ExplainError | None = None
    _step: int = 1
    #: Number of lines read.
    _read: int = 0
    #: Value of `_read` at the next line that is kept.
    _next: int = 0
    _random: Random = field(default_factory=_random)

    def watch(self, chunks: Iterable[RawChunk]) -> Iterator[RawChunk]:
        """Yield the chunks unchanged, and keep the spread of their lines."""
        for chunk in chunks:
            self.explain = chunk.explain
            for number, line in chunk.lines:
                if self._read == self._next:
                    request, _ = split_kept(line)
                    self._keep(number, request, chunk.too_long.get(number))
                self._read += 1
            yield chunk

    def _keep(self, number: int, line: bytes, too_long: int | None) -> None:
        self._kept.append((number, line, too_long))
        if len(self._kept) == 2 * self.rows:
            self._kept, self._step = (
                _one_of_each(self._kept, self.rows, self._random),
                2 * self._step,
            )
        self._next = len(self._kept) * self._step + self._random.randrange(self._step)

    @property
    def chosen(self) -> list[_Line]:
        """The chosen lines."""
        return _one_of_each(self._kept, min(self.rows, len(self._kept)), _random())

    def chunk(self) -> RawChunk:
        """Return the chosen lines as one chunk; BatchConflict if the file has no line."""
        if not (chosen := self.chosen):
            raise BatchConflict("there is nothing to try: the file has no request lines")
        lines = [(number, line) for number, line, _ in chosen]
        return RawChunk(
            ordinal=0,
            first=lines[0][0],
            cursor=lines[-1][0],
            digest=hashlib.sha256(b"\n".join(line for _, line in lines)).hexdigest(),
            size=sum(len(line) for _, line in lines),
            lines=lines,
            too_long={number: size for number, _, size in chosen if size is not None},
            explain=self.explain,
        )


class Trial:
    """The batch of a trial. Leaving the context, or `drop`, cancels and removes it.

    `submission` is that of the whole file. With the `batch_id` of a trial that has begun, the
    object reads that trial.
    """

    def __init__(
        self,
        store: BatchStore,
        settings: Settings,
        submission: Submission,
        spread: Spread,
        batch_id: str = "",
    ) -> None:
        moment = dt.datetime.now(dt.UTC)
        #: The batch's id.
        self.id = batch_id or f"try_{moment:%Y%m%d%H%M%S}_{secrets.token_hex(8)}"
        self._store, self._settings, self._spread = store, settings, spread
        self._submission = replace(
            submission, batch_id=self.id, priority=_PRIORITY, in_order=False, dedupe=False,
            reuse_s=None, order="input", deadline=f"+{LIFE_MS}", keep_ms=KEEP_MS, stop_after="",
            notify="", keep=(),
        )  # fmt: skip
        overrides, of_table = submission.overrides, spread.explain is not None
        self._prompts = {
            number: _prompt_and_tokens(line, overrides, of_table)
            for number, line, _ in spread.chosen
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def begin(self, input_name: str) -> None:
        """Queue the rows. Raises BatchConflict for a file without lines, or StoreUnavailable."""
        chunk = self._spread.chunk()
        batch = self._submission.create(self._store, input_name)
        Submitter(self._store, self._settings, self._submission, batch).run(iter([chunk]))

    def state(self) -> Batch | None:
        """Return the batch's current state; None if it is gone."""
        return self._store.batch(self.id)

    def rows(self) -> list[TriedRow]:
        """Return the rows that have ended, in the file's order.

        Raises BatchConflict if the batch is gone.
        """
        return list(self._rows(follow=False))

    def follow(self, sleep: Callable[[float], None] = time.sleep) -> Iterator[TriedRow]:
        """Yield each row when it has ended, in the file's order."""
        return self._rows(follow=True, sleep=sleep)

    def _rows(
        self, *, follow: bool, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[TriedRow]:
        if (batch := self.state()) is None:
            raise BatchConflict(f"the trial {self.id} is gone; try again")
        collector = Collector(self._store, batch, follow=follow, partial=not follow, sleep=sleep)
        for line in collector.lines("input"):
            yield self._row(line)

    def _row(self, result: ResultLine) -> TriedRow:
        value = orjson.loads(result.json)
        error, response = value["error"], value["response"]
        line = (error or value["warmq"])["line"]
        prompt, estimated = self._prompts.get(line, ("", 0))
        row = TriedRow(line, value["custom_id"], prompt, estimated_tokens=estimated)
        if error:
            return replace(row, error_code=error["code"], error_message=error["message"])
        body = response["body"]
        if not isinstance(body, dict):  # another program has written it
            return row
        tokens_in, tokens_out = tokens_of(body)
        return replace(
            row, text=text_of(body), finish_reason=finish_reason_of(body), prompt_tokens=tokens_in,
            completion_tokens=tokens_out,
        )  # fmt: skip

    def drop(self) -> None:
        """Cancel the batch if it has not ended, and remove it. May be called again."""
        batch = self.state()
        if batch is not None:
            if not batch.finished:
                self._store.cancel(batch)
            self._store.delete(self.id, force=True)


def _prompt_and_tokens(
    line: bytes, overrides: dict[str, object], of_table: bool
) -> tuple[str, int]:
    """Return a line's prompt as text, and its estimated tokens; of a bad line its beginning."""
    try:
        request = parse_line(line, overrides)
    except RequestRejected:
        if of_table and line.startswith(b"["):  # a row that could not become a line
            return "", 0
        return line[:_LINE_CHARACTERS].decode(errors="replace").rstrip(), 0
    body, counter = orjson.loads(request.body), CharacterCounter()
    (tokens,) = counter.count([prompt_of(request.url, body, counter.chat)])
    return prompt_text(body), tokens


def failures(rows: Iterable[TriedRow]) -> Counter[str]:
    """Count the failed rows by error code."""
    return Counter(row.error_code for row in rows if row.error_code is not None)


def measured_plan(plan: Plan, rows: Iterable[TriedRow]) -> Plan:
    """Return the plan of the whole file with the tokens that the trial's answers report.

    Prompt tokens are the estimate times the trial's ratio of measured to estimated tokens. The plan
    stays as it is if no row has an answer.
    """
    answered = [row for row in rows if row.ok and row.prompt_tokens and row.estimated_tokens]
    if not answered:
        return plan
    content = plan.content
    ratio = sum(row.prompt_tokens or 0 for row in answered) / sum(
        r.estimated_tokens for r in answered
    )
    mean = sum(row.completion_tokens or 0 for row in answered) / len(answered)
    measured = replace(
        content,
        prompt_tokens=round(content.prompt_tokens * ratio),
        expected=mean * content.requests,
    )
    return replace(plan, content=measured, mean_answer=mean)
