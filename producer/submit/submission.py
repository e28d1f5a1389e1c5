"""Holds the options of a submit, and creates its batch."""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from contract import naming
from contract.batch import Batch
from contract.errors import BatchConflict
from contract.message import MessageWriter
from contract.redis.batches import BatchStore
from producer.input.options import BadOption, check_name
from producer.input.seen import SeenIds
from producer.submit import batch_trace

#: Version number in every digest; it changes if chunk boundaries or messages change.
_FORMAT = 2
#: Order in which the lines are queued; `auto` chooses `input` or `prefix` (producer/submit/order).
OrderOption = Literal["input", "prefix", "auto"]
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def new_batch_id() -> str:
    """Return a new batch id."""
    return f"batch_{dt.datetime.now(dt.UTC):%Y%m%d%H%M%S}_{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class WindowContext:
    """Context of a window, the part of a file that a run submits as one batch.

    `digest` covers the file before the window. `seen` has the custom_ids of all windows, as
    requests of one batch called `name` (producer/run/windows.py).
    """

    digest: str
    seen: SeenIds
    name: str


@dataclass(frozen=True, slots=True)
class Submission:
    """The options on which a batch's messages depend."""

    batch_id: str
    queue: str
    priority: int
    model: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    deadline: str = ""  # ms since 1970, or `+` and ms after the batch's creation; '' for never
    window: WindowContext | None = None
    tenant: str = naming.DEFAULT_TENANT
    in_order: bool = False  # run after the tenant's earlier batches with this option
    dedupe: bool = False  # run lines with the same body once, if repeatable (lines.py)
    order: OrderOption = "input"
    parent_traceparent: str = ""  # the caller's trace; '' for none

    def check(self) -> None:
        """Raise BadOption for names that cannot be part of a Redis key."""
        check_name("batch id", self.batch_id)
        check_name("tenant", self.tenant)
        if _CONTROL.search(self.queue):
            raise BadOption(f"model {self.model!r}: control characters are not allowed")

    def check_deadline(self, store: BatchStore) -> None:
        """Raise BadOption for a deadline that has passed on Redis's clock.

        For an existing batch it raises nothing: its submit may be resumed.
        """
        if not self.deadline or self.deadline.startswith("+"):
            return
        now_ms, moment_ms = store.now_ms(), int(self.deadline)
        if moment_ms <= now_ms and store.batch(self.batch_id) is None:
            moment, now = (
                dt.datetime.fromtimestamp(ms / 1000, dt.UTC).isoformat(timespec="seconds")
                for ms in (moment_ms, now_ms)
            )
            raise BadOption(
                f"the deadline {moment} has passed: on Redis's clock it is {now}; give a later "
                "one, or a duration such as 2h"
            )

    @property
    def options(self) -> str:
        """The options as JSON. Submits with equal JSON write equal messages."""
        shaping = {"queue": self.queue, "priority": self.priority, "set": self.overrides}
        # Defaults are left out, so that digests of earlier versions stay valid.
        if self.deadline:
            shaping["deadline"] = self.deadline
        if self.tenant != naming.DEFAULT_TENANT:
            shaping["tenant"] = self.tenant
        if self.in_order:
            shaping["turn"] = "fifo"
        if self.dedupe:
            shaping["once"] = True
        if self.order != "input":
            shaping["order"] = self.order
        return orjson.dumps(shaping, option=orjson.OPT_SORT_KEYS).decode()

    @property
    def seed(self) -> str:
        """The digest (hex) before the file's first chunk."""
        return hashlib.sha256(b"warmq %d\n" % _FORMAT + self.options.encode()).hexdigest()

    @property
    def start(self) -> str:
        """The digest (hex) before the batch's first chunk."""
        return self.window.digest if self.window else self.seed

    def create(
        self, store: BatchStore, input_name: str, *, planned: bool = False, ends: bool = False
    ) -> Batch:
        """Create the batch, or return the one that an earlier submit has created.

        With `planned`, messages are queued after all lines have been read (planned.py). With `ends`
        the batch is created sealed (completely submitted), so that no submit adds lines.

        Raises:
            BatchConflict: the batch has other options.
            ProtocolMismatch: the batch was created by a newer warmq, or by 0.1.0.
        """
        fields: dict[str, str | int] = {
            "model": self.model,
            "queue": self.queue,
            # The name of a file may be any bytes.
            "input": input_name.encode(errors="replace").decode(),
            "options": self.options,
            "tenant": self.tenant,
            "list": self._new_list,
            **batch_trace.new_batch_fields(self.parent_traceparent),
        }
        if self.dedupe:
            fields["identical"] = 0  # tells the scripts that lines may share a result
        if planned:
            fields["planned"] = 0
        if ends:
            fields["sealed"] = 1
        _, batch = store.create(self.batch_id, self.start, fields, deadline=self.deadline)
        theirs = batch.fields.get("options", "")
        if theirs != self.options:
            raise BatchConflict(
                f"batch {batch.id} was submitted with other options: {theirs}, now {self.options}",
                remedy="same_options",
            )
        return batch

    @property
    def _new_list(self) -> str:
        # The windows of a run share one list in Redis, and take turns as one batch does.
        name = self.window.name if self.window else self.batch_id
        batch = "" if self.in_order else name
        return naming.turn_list(self.queue, self.priority, self.tenant, batch)

    def writer(self, batch: Batch) -> MessageWriter:
        """Return the writer of the batch's messages."""
        # All messages of a batch must have the same deadline. The batch's own may be missing: a
        # retry removes it, and may have run while this submit was interrupted.
        created, deadline, trace = int(batch.created), None, batch.fields.get(batch_trace.FIELD, "")
        if self.deadline:
            after = created if self.deadline.startswith("+") else 0
            deadline = (int(self.deadline) + after) / 1000
        return MessageWriter(
            batch.id, created, batch.life, self.queue, self.priority, deadline, trace
        )
