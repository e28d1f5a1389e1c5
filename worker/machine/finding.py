"""One problem of a set-up and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """`fatal` ones keep the engine from starting, or would make it fail; others are to be known."""

    problem: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}."
