"""Reads the state of one batch from the fields of its hash in Redis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from contract.naming import DEFAULT_TENANT
from contract.results import OUTCOMES

#: The message of a request that a user cancelled.
BY_USER = "cancelled by the user"


#: Seconds that a batch over HTTP takes at least, for people: its times are whole seconds.
LEAST_HTTP_S = 1.0
#: The field that marks a batch whose times are those of its record, in whole seconds
#: (producer/over_http.py). Redis does not have it.
WHOLE_SECONDS = "whole_seconds"


def mean_rate(done: int, seconds: float | None, *, retried: bool = False) -> float | None:
    """Return a batch's mean of requests per second, None if it is not known.

    A batch that was retried has none: it did not run between its end and the retry.
    """
    return None if seconds is None or retried or not done else done / max(0.001, seconds)


@dataclass(frozen=True, slots=True)
class Batch:
    """The state of a batch when it was read; times are Redis's in ms, counts are of requests.

    `reconnects` is how often the store had connected again (contract/redis/reads.py) before it read
    the batch. `windows` has the windows of a run that Redis has, the oldest first.
    """

    id: str
    fields: dict[str, str]
    reconnects: int = field(default=0, compare=False)
    windows: tuple[Batch, ...] = field(default=(), compare=False)

    def number(self, name: str) -> int:
        """Return a counter, 0 if the hash does not have it."""
        return int(self.fields.get(name) or 0)

    @property
    def created(self) -> str:
        """The creation time in ms since 1970, as text, as in the messages of this batch."""
        return self.fields["created_at"]

    @property
    def life(self) -> str:
        """A random text made with the batch, also in its messages; '' in a batch of 0.1.0.

        A batch that is deleted and made again with the same id has another `life`.
        """
        return self.fields.get("life", "")

    @property
    def protocol(self) -> int:
        """The protocol (contract/version.py) of the producer that queued the batch."""
        return self.number("v") or 1

    @property
    def tenant(self) -> str:
        """The tenant of the batch's requests."""
        return self.fields.get("tenant", DEFAULT_TENANT)

    @property
    def queues(self) -> list[str]:
        """The queues that the batch's requests were put into; at least one."""
        several = self.fields.get("queues")
        return several.split("\n") if several else [self.fields.get("queue", "")]

    @property
    def routes(self) -> dict[str, str]:
        """The queue of each model that chooses one; the key '' has the queue of all other models.

        The key '' may be missing. Empty if the lines' models do not choose queues.
        """
        raw = self.fields.get("routes")
        return orjson.loads(raw) if raw else {}

    @property
    def sealed(self) -> bool:
        """Whether all lines were submitted (or the batch was cancelled)."""
        return "sealed" in self.fields

    @property
    def planned(self) -> bool:
        """Whether the messages are queued after all lines are known, in a planned order."""
        return "planned" in self.fields

    @property
    def finished(self) -> bool:
        """Whether every line has its result."""
        return "finished_at" in self.fields

    @property
    def stopped(self) -> bool:
        """Whether so many requests failed that the batch was cancelled (`stop_after`)."""
        # The retry of a producer of 0.2.0 leaves the field `stopped` behind.
        return "stopped" in self.fields and "cancelling" in self.fields

    @property
    def written(self) -> frozenset[str]:
        """The fingerprints of the files to which the results were written last."""
        return frozenset(self.fields.get("written", "").split())

    @property
    def dedupe(self) -> bool:
        """Whether lines with the same body are computed once (deduplication)."""
        return "identical" in self.fields

    @property
    def expected(self) -> dict[str, Any] | None:
        """The estimate made at submit: prompt_tokens, completion_tokens, seconds; or None."""
        raw = self.fields.get("expected")
        return orjson.loads(raw) if raw else None

    @property
    def expected_s(self) -> float | None:
        """The seconds that submit estimated; None if no worker had measured its speed then."""
        seconds = (self.expected or {}).get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None

    @property
    def seconds(self) -> float | None:
        """The seconds from the creation to the last request's end; None while unfinished.

        Those of a batch made over HTTP count from its queueing (producer/over_http.py).
        """
        ended, began = self.fields.get("finished_at"), self.fields.get("in_progress_at")
        return (int(ended) - int(began or self.created)) / 1000 if ended else None

    @property
    def shown_s(self) -> float | None:
        """The `seconds` that people see, of which `rate` is the mean.

        None after a retry: `seconds` count the pause before it.
        """
        least_s = LEAST_HTTP_S if WHOLE_SECONDS in self.fields else 0.0
        known = self.seconds is not None and not self.number("retried")
        return max(least_s, self.seconds or 0.0) if known else None

    @property
    def rate(self) -> float | None:
        """The mean of requests per second of an ended batch; None if it is not known."""
        return mean_rate(self.done, self.shown_s, retried=bool(self.number("retried")))

    @property
    def is_run(self) -> bool:
        """Whether this is a run: a record with windows (contract/runs.py)."""
        return "windows" in self.fields

    @property
    def may_grow(self) -> bool:
        """Whether this is a run that may read more lines.

        One that was stopped reads again the lines of the windows that it has deleted.
        """
        read_all = self.finished or self.fields.get("unread") == "0"
        return self.is_run and (self.stopped or not read_all)

    @property
    def waits_for_run(self) -> bool:
        """Whether this is an unfinished run whose queued requests have all ended."""
        queued = self.number("total")
        return self.is_run and not self.finished and 0 < queued == self.terminal

    @property
    def complete(self) -> bool:
        """Whether this is a run that has written all its results, also those of cancelled lines."""
        if not (self.is_run and self.finished) or self.stopped:
            return False
        # A cancel ends the record before the command has written the output.
        written = self.fields.get("unread") == "0" and not self.windows
        return written or "cancelling" not in self.fields

    @property
    def parts(self) -> tuple[Batch, ...]:
        """The batches that have the requests: the windows of a run, otherwise this batch."""
        return self.windows if self.is_run else (self,)

    @property
    def done(self) -> int:
        """The number of requests that completed or failed: the progress that people see."""
        return self.number("completed") + self.number("failed")

    @property
    def terminal(self) -> int:
        """The number of ended requests: each has a result."""
        return sum(self.number(name) for name in OUTCOMES)

    @property
    def status(self) -> str:
        """OpenAI's status of the batch, or `deleting`."""
        if "deleting" in self.fields:
            return "deleting"
        # A run whose rows had all ended before it was cancelled has no cancelled row.
        too_late = self.complete and not self.number("cancelled")
        if "cancelling" in self.fields and not too_late:
            return "cancelled" if self.finished else "cancelling"
        if not self.sealed:
            return "validating"
        if not self.finished:
            return "in_progress"
        # OpenAI's batches without a valid request are `completed`, with all errors in a file.
        if self.number("valid") == 0 and "over_http" not in self.fields:
            return "failed"
        return "expired" if self.number("expired") else "completed"
