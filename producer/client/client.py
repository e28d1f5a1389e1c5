"""The client: submits requests, and finds batches."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal, Protocol, Self, TypedDict, Unpack

from contract.naming import DEFAULT_TENANT, queue_name
from contract.redis.batches import BatchStore
from contract.settings import Settings, load
from producer.batch_watch import find_batch
from producer.client.batch import Batch, store_of
from producer.input.iterable import IterableSource, ToLine, line_of
from producer.input.options import BadOption, check_column_conflicts, check_field_conflicts
from producer.input.source import Source, open_source
from producer.input.tables.frames import frame_source, is_data_set, is_frame, unpadded
from producer.input.tables.mapping import RowMapping
from producer.queue_workers import refuse_older_workers
from producer.remedies import add_remedies
from producer.submit.submission import OrderOption, Submission, new_batch_id
from producer.submit.submit import ResumableSubmit


class SupportsArrow(Protocol):
    """A data frame or table of any library that speaks Arrow."""

    def __arrow_c_stream__(self, requested_schema: object | None = None, /) -> object:
        """Return a capsule of an Arrow stream."""


#: A request as a line of a file has it, `{"prompt": ...}`, `{"messages": ...}` or OpenAI's form.
Request = Mapping[str, Any]
Requests = Iterable[Request] | SupportsArrow | str | os.PathLike[str]
Deadline = dt.timedelta | dt.datetime


class SubmitOptions(TypedDict, total=False):
    """Options of `submit`; all may be left out.

    columns: of rows that are no requests as they stand: the column, or the template over columns,
        that each field gets, as `{"prompt": "text"}` or `{"messages.user": "Translate: {text}"}`.
    batch_id: name of the batch; the same one resumes it. By default a new one.
    model: served model to send the requests to; '' for workers without a name.
    fields: body fields that every request gets, as `{"max_tokens": 256}`.
    priority: 0 (most urgent) to 9, in steps of 3; 6 by default.
    tenant: whose requests these are.
    turn: `fair` shares with the tenant's other batches, `fifo` waits for them.
    deadline: when unfinished requests expire: after the batch's creation, or at a time.
    once: run requests with the same body once, where temperature is 0.
    order: `prefix` queues requests with a common beginning together, `auto` where that saves
        something; neither is possible for what can be iterated only once.
    """

    columns: Mapping[str, str]
    batch_id: str | None
    model: str
    fields: Mapping[str, Any]
    priority: int
    tenant: str
    turn: Literal["fair", "fifo"]
    deadline: Deadline | None
    once: bool
    order: OrderOption


def submission_of(options: SubmitOptions, settings: Settings) -> Submission:
    """Return what the options ask for.

    Raises:
        BadOption: naming the one that is wrong.
    """
    if unknown := sorted(options.keys() - SubmitOptions.__annotations__.keys()):
        known = ", ".join(SubmitOptions.__annotations__)
        raise BadOption(f"{unknown[0]} is no option of submit; there are {known}")
    model, turn = options.get("model", ""), options.get("turn", "fair")
    order: OrderOption = options.get("order", "input")
    for name, value, among in (
        ("turn", turn, ("fair", "fifo")),
        ("order", order, ("input", "prefix", "auto")),
        ("priority", options.get("priority", 6), range(10)),
    ):
        if value not in among:
            raise BadOption(f"{name} {value!r}: give one of {', '.join(map(str, among))}")
    check_field_conflicts(
        options.get("fields", {}), options.get("columns", {}), ("fields", "columns")
    )
    submission = Submission(
        options.get("batch_id") or new_batch_id(),
        queue_name(model or None, settings.queue),
        options.get("priority", 6),
        model,
        dict(options.get("fields", {})),
        _deadline(options.get("deadline")),
        tenant=options.get("tenant", DEFAULT_TENANT),
        in_order=turn == "fifo",
        dedupe=options.get("once", False),
        order=order,
    )
    submission.check()
    return submission


def _deadline(deadline: Deadline | None) -> str:
    """Return a deadline as CREATE takes it."""
    if deadline is None:
        return ""
    if isinstance(deadline, dt.timedelta):
        if deadline <= dt.timedelta():
            raise BadOption(f"deadline {deadline}: give a duration above 0")
        return f"+{round(deadline.total_seconds() * 1000)}"
    if deadline.tzinfo is None:
        raise BadOption(f"deadline {deadline}: the time zone is missing; give one, as dt.UTC")
    return str(round(deadline.timestamp() * 1000))


class Client:
    """Submits requests to the queue and finds batches again. Threads may share one.

    Args:
        url: Redis' address; by default the setting WARMQ_REDIS_URL.
        queue: base name of the queue; by default the setting WARMQ_QUEUE.

    Raises:
        SettingsError: naming what is wrong with a setting.
    """

    def __init__(self, url: str | None = None, *, queue: str | None = None) -> None:
        given = {"redis_url": url, "queue": queue}
        named = {name: value for name, value in given.items() if value is not None}
        self._settings = load(Settings, **named)

    @cached_property
    def _store(self) -> BatchStore:
        return store_of(self._settings)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to make connections of its own."""
        return {"_settings": self._settings}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; batches go on."""
        if "_store" in self.__dict__:
            self._store.close()
            del self.__dict__["_store"]

    def submit(self, requests: Requests, **options: Unpack[SubmitOptions]) -> Batch:
        """Queue requests as one batch; return when all are queued. They run meanwhile.

        A request that is wrong becomes an error result, the others run. The same call with the same
        `batch_id` and requests goes on where an interrupted one stopped; no request runs twice.

        Args:
            requests: any iterable of dicts; a data frame or table (pandas, polars, pyarrow), whose
                rows are the requests; or the path of a file: JSON lines, parquet, Arrow, CSV.
            options: `columns` (which column is which field), `batch_id`, `model`, `fields` and the
                others that SubmitOptions explains.

        Raises:
            BadOption: an argument is wrong.
            BatchConflict: the batch is there and has other requests or options.
            StoreUnavailable: Redis cannot be used; the same call goes on later.
            What iterating over `requests` raises; the batch stays open then.
        """
        with add_remedies():
            submission = submission_of(options, self._settings)
            source = _source(requests, options.get("columns", {}))
            check_column_conflicts(options.get("fields", {}), source, "fields")
            if submission.order == "prefix" and not source.repeatable:
                raise BadOption(
                    "order 'prefix' is planned from all requests, and these can be iterated only "
                    "once: give a list, or leave it out"
                )
            submission.check_deadline(self._store)
            refuse_older_workers(self._store, submission.queue)
            resuming = ResumableSubmit(self._store, self._settings, submission, source)
            return Batch(self._store, resuming.submit().batch, self._settings, resuming)

    def batch(self, batch_id: str) -> Batch:
        """Return a batch that is there, whoever has submitted it.

        Raises:
            BatchConflict: there is none of that id.
        """
        found = find_batch(self._store, self._settings, batch_id)
        return Batch(self._store, found, self._settings)

    def batches(self) -> list[Batch]:
        """Return all batches, newest first."""
        return [Batch(self._store, found, self._settings) for found in self._store.batches()]


def _source(requests: Any, columns: Mapping[str, str]) -> Source:
    """Return what the requests are read from.

    Raises:
        BadOption, InputUnreadable, ExtraMissing: saying what is taken instead.
    """
    if isinstance(requests, str | os.PathLike):
        return open_source(os.fspath(requests), columns)
    if is_frame(requests):
        return frame_source(requests, columns)
    if isinstance(requests, Mapping) or not isinstance(requests, Iterable):
        kind = type(requests).__name__
        raise BadOption(
            f"requests: {kind} is not taken; give an iterable of dicts such as "
            '[{"prompt": "..."}], a data frame, or the path of a file'
        )
    to_line: ToLine = line_of
    more: dict[str, Any] = {}
    if columns:
        known = getattr(requests, "column_names", None)  # of a data set; a streamed one may not
        mapping = RowMapping(columns, known if isinstance(known, list) else None)
        to_line, more = mapping.line_of_values, {"what": "row", "columns": mapping.columns}
    if is_data_set(requests):
        to_line = unpadded(requests, to_line)
    return IterableSource(requests, to_line, **more)
