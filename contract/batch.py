"""The state of one batch, as its Redis hash holds it."""

from dataclasses import dataclass
from typing import Any

import orjson

from contract.naming import DEFAULT_TENANT
from contract.results import OUTCOMES


@dataclass(frozen=True, slots=True)
class Batch:
    """A snapshot of a batch. Times are ms of Redis time, counts are requests."""

    id: str
    fields: dict[str, str]

    def number(self, name: str) -> int:
        """Return a counter, 0 if it was never touched."""
        return int(self.fields.get(name) or 0)

    @property
    def created(self) -> str:
        """The creation time in ms, as in the messages of this batch."""
        return self.fields["created_at"]

    @property
    def life(self) -> str:
        """The random mark of this batch and its messages; '' in a batch of 0.1.0."""
        return self.fields.get("life", "")

    @property
    def protocol(self) -> int:
        """The protocol (contract/version.py) of the producer that queued it."""
        return self.number("v") or 1

    @property
    def tenant(self) -> str:
        """The tenant of its requests."""
        return self.fields.get("tenant", DEFAULT_TENANT)

    @property
    def sealed(self) -> bool:
        """Whether all lines were submitted (or the batch was cancelled)."""
        return "sealed" in self.fields

    @property
    def planned(self) -> bool:
        """Whether its messages come after all its lines, in the order of a plan."""
        return "planned" in self.fields

    @property
    def finished(self) -> bool:
        """Whether every line has its terminal result."""
        return "finished_at" in self.fields

    @property
    def written(self) -> frozenset[str]:
        """Marks of the files that its results were written to last."""
        return frozenset(self.fields.get("written", "").split())

    @property
    def dedupe(self) -> bool:
        """Whether lines with the same repeatable body run once in it."""
        return "identical" in self.fields

    @property
    def expected(self) -> dict[str, Any] | None:
        """Its submit's estimate: prompt_tokens, completion_tokens, seconds; None without one."""
        raw = self.fields.get("expected")
        return orjson.loads(raw) if raw else None

    @property
    def expected_s(self) -> float | None:
        """Its submit's estimate of its duration; None where no worker had measured."""
        seconds = (self.expected or {}).get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None

    @property
    def seconds(self) -> float | None:
        """Its duration, from creation to the last request's end; None while unfinished."""
        ended = self.fields.get("finished_at")
        return (int(ended) - int(self.created)) / 1000 if ended else None

    @property
    def terminal(self) -> int:
        """How many requests have a terminal result."""
        return sum(self.number(name) for name in OUTCOMES)

    @property
    def status(self) -> str:
        """OpenAI's word for the state, or `deleting`."""
        if "deleting" in self.fields:
            return "deleting"
        if "cancelling" in self.fields:
            return "cancelled" if self.finished else "cancelling"
        if not self.sealed:
            return "validating"
        if not self.finished:
            return "in_progress"
        valid = self.number("valid")  # bad lines have no deadline: they were rejected
        if valid == 0:
            return "failed"
        return "expired" if self.number("expired") == valid else "completed"
