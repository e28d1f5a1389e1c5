"""Holds the options of a submit, and creates its batch."""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from contract import naming
from contract.batch import Batch
from contract.errors import BatchConflict
from contract.message import MessageWriter
from contract.redis.batches import BatchStore
from contract.webhooks import check_url
from producer.input.options import BadOption, check_name
from producer.input.seen import SeenIds
from producer.redis import NotifySecret
from producer.submit import batch_trace

#: Version number in every digest; it changes if chunk boundaries or messages change.
_FORMAT = 2
#: Order in which the lines are queued; `auto` chooses `input` or `prefix` (producer/submit/order).
OrderOption = Literal["input", "prefix", "auto"]
#: Most characters that an error shows of an option's value.
_SHOWN = 60
#: Options whose name in a batch differs from that of the command and the client.
_OPTION_NAMES = {"once": "dedupe"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_COUNT, _SHARE = re.compile(r"[0-9]{1,12}"), re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")


def stop_after_text(value: object, name: str) -> str:
    """Return a limit of failures as a batch has it, for example `100` or `5%`; '' for None.

    Raises BadOption, with the option's `name`, for anything but a number of failed requests or a
    share in percent, both above 0.
    """
    if value is None:
        return ""
    text = str(value).strip() if isinstance(value, int | str) else ""
    if _COUNT.fullmatch(text) and not isinstance(value, bool) and int(text) > 0:
        return str(int(text))
    share = _SHARE.fullmatch(text)
    if share is not None and 0 < float(share[1]) <= 100:
        return f"{float(share[1]):.6f}".rstrip("0").rstrip(".") + "%"
    raise BadOption(
        f"{name} {str(value)[:40]}: give a number of failed requests, for example 100, or a share "
        "of at most 100%, for example 5%"
    )


def change_limit(store: BatchStore, batch: Batch, stop_after: str) -> tuple[Batch, int]:
    """Give a batch another `stop_after`; a batch that the former one has stopped goes on.

    Returns its state, and the number of failed and cancelled requests that run again.
    """
    if batch.fields.get("stop_after", "") == stop_after:
        return batch, 0
    store.limit_failures(batch, stop_after)
    again = store.retry(batch, ("failed", "cancelled")) if batch.stopped else 0
    return store.batch(batch.id) or batch, again


def seed_of(options: str) -> str:
    """Return the digest (hex) before a file's first chunk, for a submission's `options`."""
    return hashlib.sha256(b"warmq %d\n" % _FORMAT + options.encode()).hexdigest()


def _other_options(batch: Batch, now: str) -> BatchConflict:
    """Return the error that names the options that differ, with the beginnings of their values."""
    old, new = _option_texts(batch.fields.get("options", "")), _option_texts(now)
    found = []
    for name in sorted(old.keys() | new.keys()):
        if (was := old.get(name, "")) != (given := new.get(name, "")):
            texts = [
                text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in (was, given)
            ]
            was, given = (text or "not given" for text in texts)
            found.append(f"{name} differs" if was == given else f"{name} was {was}, now {given}")
    text = f"batch {batch.id} was submitted with other options: {'; '.join(found)}"
    return BatchConflict(text, remedy="same_options")


def _option_texts(options: str) -> dict[str, str]:
    """Return the JSON of each option, and of each field that is set for all lines."""
    given = {_OPTION_NAMES.get(name, name): v for name, v in orjson.loads(options or "{}").items()}
    fields = {f"set {name}": value for name, value in given.pop("set", {}).items()}
    return {
        name: orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
        for name, value in (given | fields).items()
    }


def new_batch_id() -> str:
    """Return a new batch id."""
    return f"batch_{dt.datetime.now(dt.UTC):%Y%m%d%H%M%S}_{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class WindowContext:
    """Context of a window, the part of a file that a run submits as one batch.

    `digest` covers the file before the window. `seen` has the custom_ids of all windows, as
    requests of one batch called `name` (producer/run/windows.py). `judged_from` has the failures
    before the window (contract/lua/failures.lua).
    """

    digest: str
    seen: SeenIds
    name: str
    judged_from: dict[str, str] = field(default_factory=dict)


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
    notify: str = ""  # URL of the webhook at the batch's end; '' for none
    parent_traceparent: str = ""  # the caller's trace; '' for none
    stop_after: str = ""  # failures after which the batch is cancelled: "100", "5%"; '' for never
    keep_ms: int = 0  # how long results are kept after the batch's end; 0: WARMQ_RESULT_TTL_S
    keep: tuple[str, ...] = ()  # columns of the table for the output
    routes: Mapping[str, str] = field(default_factory=dict)  # queue by model (routes.py)
    reuse_s: float | None = None  # greatest age of known answers to reuse (reuse.py); None: none

    def check(self) -> None:
        """Raise BadOption for names that cannot be part of a Redis key."""
        check_name("batch id", self.batch_id)
        check_name("tenant", self.tenant)
        if self.reuse_s is not None and self.order != "input":
            raise BadOption("reuse and order exclude each other: give one")
        if self.notify:
            try:
                check_url(self.notify)
            except ValueError as error:
                raise BadOption(f"notify: {error}") from None
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
        """The options as JSON. Submits with equal JSON write equal messages.

        `stop_after` is not one of them: the same submit may change it (ResumableSubmit).
        """
        options = {"queue": self.queue, "priority": self.priority, "set": self.overrides}
        # Defaults are left out, so that digests of earlier versions stay valid.
        if self.deadline:
            options["deadline"] = self.deadline
        if self.tenant != naming.DEFAULT_TENANT:
            options["tenant"] = self.tenant
        if self.in_order:
            options["turn"] = "fifo"
        if self.dedupe:
            options["once"] = True
        if self.order != "input":
            options["order"] = self.order
        if self.notify:
            options["notify"] = self.notify
        if self.keep:
            options["keep"] = self.keep
        return orjson.dumps(options, option=orjson.OPT_SORT_KEYS).decode()

    @property
    def seed(self) -> str:
        """The digest (hex) before the file's first chunk."""
        return seed_of(self.options)

    @property
    def start(self) -> str:
        """The digest (hex) before the batch's first chunk."""
        return self.window.digest if self.window else self.seed

    def create(
        self,
        store: BatchStore,
        input_name: str,
        *,
        planned: bool = False,
        ends: bool = False,
        over_http: bool = False,
        columns: Mapping[str, str] | None = None,
        kept_columns: str = "",
        delimiter: str = "",
    ) -> Batch:
        """Create the batch, or return the one that an earlier submit has created.

        With `planned`, messages are queued after all lines have been read (planned.py). With `ends`
        the batch is created sealed (completely submitted), so that no submit adds lines.
        `over_http`: a gateway has a record of the batch. `columns`, `kept_columns` (the source's
        `output_columns`) and `delimiter` are a table's, for a retry that reads it again.

        Raises:
            BatchConflict: the batch has other options.
            ProtocolMismatch: the batch was created by a newer warmq, or by 0.1.0.
        """
        fields: dict[str, str | int] = {
            "model": self.model,
            "queue": self.queue,
            "input": input_name.encode(errors="replace").decode(),  # a name may be any bytes
            "options": self.options,
            "tenant": self.tenant,
            "list": self._new_list,
            **self._notify_fields(store),
            **batch_trace.new_batch_fields(self.parent_traceparent),
            **self._end_fields,
        }
        optional: dict[str, tuple[object, str | int]] = {
            "identical": (self.dedupe, 0),  # tells the scripts that lines may share a result
            "planned": (planned, 0),
            "columns": (columns, orjson.dumps(dict(columns or {})).decode()),
            "kept_columns": (kept_columns, kept_columns),
            "delimiter": (delimiter, delimiter),
            "sealed": (ends, 1),
            "over_http": (over_http, 1),
            "routes": (self.routes, orjson.dumps(dict(self.routes)).decode()),
            "queues": (self.routes, ""),  # the scripts add the queues of its messages
        }
        fields |= {name: value for name, (given, value) in optional.items() if given}
        _, batch = store.create(self.batch_id, self.start, fields, deadline=self.deadline)
        if batch.fields.get("options", "") != self.options:
            raise _other_options(batch, self.options)
        return batch

    def run_fields(self, run: str, input_name: str) -> dict[str, str | int]:
        """Return the fields of the record of a run with these options (contract/runs.py)."""
        return {
            "model": self.model,
            "queue": self.queue,
            "input": input_name.encode(errors="replace").decode(),
            "options": self.options,
            "tenant": self.tenant,
            "list": self._list_of(run),
            **({"identical": 0} if self.dedupe else {}),
            **({"keep_ms": self.keep_ms} if self.keep_ms else {}),
            **({"stop_after": self.stop_after} if self.stop_after else {}),
        }

    @property
    def _end_fields(self) -> dict[str, str]:
        kept = {"run": self.window.name} if self.window else {}
        kept |= {"keep_ms": str(self.keep_ms)} if self.keep_ms else {}
        if not self.stop_after:
            return kept
        judged_from = self.window.judged_from if self.window else {}
        return kept | {"stop_after": self.stop_after, **judged_from}

    def _notify_fields(self, store: BatchStore) -> dict[str, str]:
        """Return the field of a batch with a webhook; make the secret with which it is signed."""
        if not self.notify:
            return {}
        NotifySecret.using(store).get()
        return {"notify": self.notify}

    @property
    def _new_list(self) -> str:
        # The windows of a run share one list in Redis, and take turns as one batch does.
        return self._list_of(self.window.name if self.window else self.batch_id)

    def _list_of(self, name: str) -> str:
        batch = "" if self.in_order else name
        return naming.turn_list(self.queue, self.priority, self.tenant, batch)

    def writer(self, batch: Batch, queue: str) -> MessageWriter:
        """Return the writer of the batch's messages for a queue."""
        # All messages of a batch must have the same deadline. The batch's own may be missing: a
        # retry removes it, and may have run while this submit was interrupted.
        created, deadline, trace = int(batch.created), None, batch.fields.get(batch_trace.FIELD, "")
        if self.deadline:
            after = created if self.deadline.startswith("+") else 0
            deadline = (int(self.deadline) + after) / 1000
        return MessageWriter(batch.id, created, batch.life, queue, self.priority, deadline, trace)
