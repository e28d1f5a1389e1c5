"""Reads how many lines of a batch failed with each error code (contract/lua/failures.lua)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from contract.batch import Batch

#: Most error codes in one text, and most first requests of a code (as in the scripts).
_CODES_IN_TEXT, _FIRST = 3, 5
#: Most codes that a batch notes, which it can note, and the code of all the rest.
_MOST_CODES, _NOTABLE, _OTHER = 20, re.compile(r"[A-Za-z0-9_.:-]{1,64}"), "other"
#: Fewest ended requests of which the share of failed ones is shown.
FEWEST = 10
#: Codes of requests that are wrong themselves.
_WRONG = frozenset((
    "invalid_json", "invalid_request", "unknown_field", "unknown_url", "duplicate_custom_id",
    "line_too_long", "context_length_exceeded", "unsupported_option", "unknown_task",
))  # fmt: skip


class _Counted(Protocol):
    """A number of failed lines with one error code."""

    @property
    def code(self) -> str: ...
    @property
    def count(self) -> int: ...


def is_wrong(code: object) -> bool:
    """Return whether a request that failed with this code is wrong itself.

    The same request would fail again, so no command and no page offers to run it again.
    """
    return isinstance(code, str) and code in _WRONG


def wrong_count(codes: Iterable[_Counted]) -> int:
    """Return the number of failed lines that are wrong themselves."""
    return sum(one.count for one in codes if is_wrong(one.code))


def wrong_text(codes: Iterable[_Counted]) -> str:
    """Return how many failed lines are wrong themselves, and by which codes; '' for none.

    For example `2 failed lines are wrong themselves (2 unknown_field): correct them`.
    """
    wrong = [one for one in codes if is_wrong(one.code)]
    if not (count := wrong_count(wrong)):
        return ""
    named = ", ".join(f"{one.count:,} {one.code}" for one in wrong)
    if count == 1:
        return f"1 failed line is wrong itself ({named}): correct it"
    return f"{count:,} failed lines are wrong themselves ({named}): correct them"


@dataclass(frozen=True, slots=True)
class CodeFailures:
    """The failures with one error code.

    `count` counts lines. `first` has the request ids of the first failed requests that were not run
    again. The code '' stands for failures from workers of 0.2.0, which noted no codes.
    """

    code: str
    count: int
    first: tuple[str, ...] = ()


def failures_of(batches: Iterable[Batch]) -> list[CodeFailures]:
    """Return the failures of one or several queue batches, the most frequent code first."""
    found: dict[str, CodeFailures] = {}
    for batch in batches:
        noted = [_read(line) for line in batch.fields.get("failures", "").splitlines()]
        failed = batch.number("failed")
        unknown = failed - sum(one.count for one in noted)
        if unknown < 0:  # a producer of 0.2.0 has run some requests again, but changed no count
            noted, unknown = [], failed
        if unknown:
            noted.append(CodeFailures("", unknown))
        for one in noted:
            before = found.get(one.code, CodeFailures(one.code, 0))
            first = (before.first + one.first)[:_FIRST]
            found[one.code] = CodeFailures(one.code, before.count + one.count, first)
    return sorted(found.values(), key=lambda one: -one.count)


def _read(line: str) -> CodeFailures:
    code, count, *first = line.split(" ")
    return CodeFailures(code, int(count), tuple(first))


def noted_codes(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts of failures by the code under which a batch notes them, as the scripts do."""
    found: dict[str, int] = {}
    for code, count in counts.items():
        notable = _NOTABLE.fullmatch(code) and (code in found or len(found) < _MOST_CODES)
        name = code if notable else _OTHER
        found[name] = found.get(name, 0) + count
    return found


def failures_text(batch: Batch) -> str:
    """Return for example `65 of 70 failed: 40 max_tokens, 25 unknown_field`; '' without failures.

    The second number, 70 here, is the number of requests that have completed or failed.
    """
    codes = failures_of([batch])
    return codes_text(codes, batch.done) if codes else ""


def failures_so_far(batch: Batch) -> str:
    """Return failures_text, or '' while too few requests of a large batch have ended."""
    small = batch.sealed and batch.number("total") < FEWEST
    return failures_text(batch) if small or batch.terminal >= FEWEST else ""


def codes_text(codes: list[CodeFailures], ended: int) -> str:
    """Return the text of failures_text for these codes, of `ended` completed or failed ones."""
    named = [f"{one.count} {one.code or 'of unknown code'}" for one in codes[:_CODES_IN_TEXT]]
    if len(codes) > _CODES_IN_TEXT:
        named.append(f"{sum(one.count for one in codes[_CODES_IN_TEXT:])} of other codes")
    if len(codes) == 1 and codes[0].code:
        named = [codes[0].code]
    return f"{sum(one.count for one in codes)} of {ended} failed: {', '.join(named)}"


def unanswered_text(counts: Mapping[str, int]) -> str:
    """Return the numbers of failed, cancelled and expired requests, for example `2 failed`."""
    found = {"failed": 0, **counts}
    return ", ".join(f"{count} {name}" for name, count in found.items())
