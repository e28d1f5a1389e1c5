"""What a submit takes besides the file, checked before anything is read."""

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

#: Part of every digest; a change of chunk boundaries or of the message's form changes it.
_FORMAT = 2
#: In which order the lines are queued; `auto` is one of the others (producer/submit/order).
OrderOption = Literal["input", "prefix", "auto"]
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def new_batch_id() -> str:
    """Return an id for a batch that its submitter does not name."""
    return f"batch_{dt.datetime.now(dt.UTC):%Y%m%d%H%M%S}_{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class WindowContext:
    """What a batch of some lines of a longer file shares with the others (producer/run/windows.py).

    `digest` is that of the file before it; custom_ids are remembered in `seen` as requests of
    the batch `name`, whichever part they are in.
    """

    digest: str
    seen: SeenIds
    name: str


@dataclass(frozen=True, slots=True)
class Submission:
    """Everything besides the file that shapes a batch's messages."""

    batch_id: str
    queue: str
    priority: int
    model: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    deadline: str = ""  # ms since 1970, or `+` and ms after the batch's creation; '' for never
    window: WindowContext | None = None
    tenant: str = naming.DEFAULT_TENANT
    #: Whether it waits for the batches that its tenant submitted so before, instead of sharing.
    in_order: bool = False
    dedupe: bool = False  # lines with the same repeatable body run once (lines.py)
    order: OrderOption = "input"
    parent_traceparent: str = ""  # the traceparent of who wants it, if that is traced

    def check(self) -> None:
        """Raise BadOption for names that cannot be part of a Redis key."""
        check_name("batch id", self.batch_id)
        check_name("tenant", self.tenant)
        if _CONTROL.search(self.queue):
            raise BadOption(f"model {self.model!r}: control characters are not allowed")

    def check_deadline(self, store: BatchStore) -> None:
        """Raise BadOption for a moment that has passed on Redis' clock, which decides.

        Not for a batch that is there: whoever resumes a submit late may complete it.
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
                f"the deadline {moment} has passed: on Redis' clock it is {now}; give a later one, "
                "or a duration such as 2h"
            )

    @property
    def options(self) -> str:
        """The options as JSON; equal for equal messages."""
        shaping = {"queue": self.queue, "priority": self.priority, "set": self.overrides}
        # What is not asked for is not named: the digest stays what it was before there was such.
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
        """The digest (hex) that the file's first chunk follows."""
        return hashlib.sha256(b"warmq %d\n" % _FORMAT + self.options.encode()).hexdigest()

    @property
    def start(self) -> str:
        """The digest (hex) that the batch's first chunk follows."""
        return self.window.digest if self.window else self.seed

    def create(
        self, store: BatchStore, input_name: str, *, planned: bool = False, ends: bool = False
    ) -> Batch:
        """Make the batch, or find the one that an earlier submit has made.

        A `planned` one gets its messages when all its lines were read (planned.py). One that
        `ends` is made so that nobody fills it any more: it is sealed.

        Raises:
            BatchConflict: if the batch has other options.
            ProtocolMismatch: if a newer warmq has made it, or 0.1.0.
        """
        fields: dict[str, str | int] = {
            "model": self.model,
            "queue": self.queue,
            "input": input_name.encode(errors="replace").decode(),  # a file's name is any bytes
            "options": self.options,
            "tenant": self.tenant,
            "list": self._new_list,
            **batch_trace.new_batch_fields(self.parent_traceparent),
        }
        if self.dedupe:
            fields["identical"] = 0  # there at all, it tells the scripts to look for followers
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
        # The parts of a run follow each other: they share a list, and a batch's turns.
        name = self.window.name if self.window else self.batch_id
        batch = "" if self.in_order else name
        return naming.turn_list(self.queue, self.priority, self.tenant, batch)

    def writer(self, batch: Batch) -> MessageWriter:
        """Return what writes the batch's messages."""
        # The deadline is the option's, not the batch's: a retry may have lifted the batch's own
        # while this submit was interrupted, and all messages of a batch must agree.
        created, deadline, trace = int(batch.created), None, batch.fields.get(batch_trace.FIELD, "")
        if self.deadline:
            after = created if self.deadline.startswith("+") else 0
            deadline = (int(self.deadline) + after) / 1000
        return MessageWriter(
            batch.id, created, batch.life, self.queue, self.priority, deadline, trace
        )
