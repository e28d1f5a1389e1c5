"""The class `Trial` of the Python library: rows that were run before a submit of all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from producer.run.trial import TriedRow, failures

if TYPE_CHECKING:  # the module loads numpy, which takes 0.1 s
    from producer.submit.plan import Plan


@dataclass(frozen=True, slots=True)
class Trial:
    """The rows that were tried, and an estimate for all requests from the tokens of these rows.

    requests, bad: numbers of valid and of bad requests in the whole input.
    first_errors: the errors of the first bad requests.
    prompt_tokens, completion_tokens: of all requests, extrapolated.
    redis_bytes: most memory in Redis that all requests take.
    seconds: until all requests and those that wait before them end; None if the workers' rate is
        unknown.
    """

    rows: tuple[TriedRow, ...]
    requests: int
    bad: int
    first_errors: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    redis_bytes: int
    seconds: float | None

    @property
    def failures(self) -> Counter[str]:
        """Number of failed rows by error code."""
        return failures(self.rows)

    @classmethod
    def of(cls, rows: list[TriedRow], estimate: Plan) -> Trial:
        """Return the trial with these rows and this plan of all requests."""
        content = estimate.content
        return cls(
            tuple(rows), content.requests, content.bad, tuple(content.first_bad),
            content.prompt_tokens, round(content.expected), estimate.memory.most, estimate.seconds,
        )  # fmt: skip
