"""What a gateway knows of a batch: kept in Redis as JSON, shown in OpenAI's or Anthropic's form."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
#: The record of a batch that has ended is kept for so long, as OpenAI's files are at most by
#: `expires_after`. Its files have ends of their own.
KEPT_S = 30 * 86_400
ENDED: frozenset[Status] = frozenset(("completed", "failed", "expired", "cancelled"))


class Part(msgspec.Struct, frozen=True):
    """The lines for one queue: a batch of it, as `producer submit` makes them.

    The first part also has the lines whose model nobody serves: they are refused one by one.
    """

    batch_id: str
    model: str  # the first of its models
    queue: str
    models: list[str] = []  # what its lines name; '' for those that name none
    named: str = ""  # the model that its lines which name none are given
    all_served: bool = False  # whether it has no lines of models that nobody serves
    told: str = ""  # what such lines are told of the models that there are
    made: bool = False  # whether the queue has had it: if it is not there, it was deleted


class Problem(msgspec.Struct, frozen=True):
    """Why the whole file was refused; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Counts(msgspec.Struct):
    """Requests of a batch; `failed` are all that have no answer (expired, cancelled ones too)."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Usage(msgspec.Struct):
    """Tokens of a batch's answers; `cached` of the input's came from the prefix cache."""

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0


class BatchRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One batch. Times are in seconds since 1970; `changed_at` has those at which a status began.

    Whoever changes it reads it, and writes it back with the version that was read
    (contract/redis/objects.py): only one of two writers wins, the other reads again.
    """

    id: str
    tenant: str
    key_id: str = ""
    api: Literal["openai", "anthropic"] = "openai"
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int  # the deadline: what has not begun by then expires
    status: Status = "validating"
    changed_at: dict[str, int] = {}
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    order: Literal["input", "prefix", "auto"] = "input"
    once: bool = False
    priority: int = 6
    traceparent: str = ""  # of the request that made it, if that is traced
    model: str = ""  # if all lines name the same
    problems: list[Problem] = []
    parts: list[Part] = []  # empty until the file was looked through
    counts: Counts = msgspec.field(default_factory=Counts)  # final once ended
    usage: Usage | None = None  # final once ended
    expected_s: float | None = None  # what was planned of its time; noted at its end
    output_file_id: str | None = None
    error_file_id: str | None = None


def end_of_record(record: BatchRecord) -> int | None:
    """Return when a record is removed, in seconds since 1970; None while its batch runs."""
    if record.status not in ENDED:
        return None
    return record.changed_at.get(record.status, record.expires_at) + KEPT_S


decode = msgspec.json.Decoder(BatchRecord).decode
encode = msgspec.json.Encoder().encode
