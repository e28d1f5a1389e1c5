"""The trial of the Python library: rows that were run before all requests are submitted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from producer.run.trial import TriedRow, failures

if TYPE_CHECKING:  # the module loads numpy, which takes 0.1 s
    from producer.submit.plan import Plan


@dataclass(frozen=True, slots=True)
class Trial:
    """The rows that were tried, and from their tokens an estimate for all requests.

    requests, bad: numbers of valid and of bad requests in the whole input.
    first_errors: the errors of the first bad ones.
    prompt_tokens, completion_tokens: of all requests, extrapolated.
    redis_bytes: most memory that they take in Redis.
    seconds: how long they take, if nothing else runs; None if the workers' rate is not known.
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
    def of(cls, rows: list[TriedRow], found: Plan) -> Trial:
        """Return the trial with these rows and this plan of all requests."""
        content = found.content
        return cls(
            tuple(rows), content.requests, content.bad, tuple(content.first_bad),
            content.prompt_tokens, round(content.expected), found.memory.most, found.seconds,
        )  # fmt: skip
