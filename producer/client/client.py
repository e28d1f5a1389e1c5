"""The client of the Python library: submits requests, and finds batches."""

from __future__ import annotations

import datetime as dt
import os
import warnings
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
    """A data frame or table of any library that exports Arrow streams."""

    def __arrow_c_stream__(self, requested_schema: object | None = None, /) -> object:
        """Return a capsule of an Arrow stream."""


#: A request with the fields of a line: `{"prompt": ...}`, `{"messages": ...}` or OpenAI's form.
Request = Mapping[str, Any]
Requests = Iterable[Request] | SupportsArrow | str | os.PathLike[str]
Deadline = dt.timedelta | dt.datetime


class SubmitOptions(TypedDict, total=False):
    """Options of `submit`; all are optional.

    columns: for rows that are not requests: the column of each field, or a template over columns.
        Examples: `{"prompt": "text"}`, `{"messages.user": "Translate: {text}"}`.
    batch_id: id of the batch; the id of an existing batch resumes it. Default: a new id.
    model: served model to send the requests to; '' for workers without a model name.
    fields: body fields of every request. Example: `{"max_tokens": 256}`.
    priority: 0 (most urgent) to 9, in steps of 3. Default: 6.
    tenant: tenant of the requests.
    turn: `fair` takes turns with the tenant's other batches, `fifo` waits for earlier `fifo` ones.
    deadline: when unfinished requests expire: a time, or a duration from the batch's creation.
    dedupe: run requests with the same body once, if their temperature is 0. `once` is its old name.
    order: `prefix` groups requests with a common beginning, `auto` does so if that saves prompt
        tokens. `prefix` needs requests that can be iterated again.
    """

    columns: Mapping[str, str]
    batch_id: str | None
    model: str
    fields: Mapping[str, Any]
    priority: int
    tenant: str
    turn: Literal["fair", "fifo"]
    deadline: Deadline | None
    dedupe: bool
    once: bool
    order: OrderOption


def submission_of(options: SubmitOptions, settings: Settings) -> Submission:
    """Return the submission for these options; raise BadOption if one is wrong."""
    if unknown := sorted(options.keys() - SubmitOptions.__annotations__.keys()):
        known = ", ".join(SubmitOptions.__annotations__)
        raise BadOption(f"{unknown[0]} is not an option of submit; the options are {known}")
    if "once" in options:
        text = "once is now dedupe; this release still takes once, the next one does not"
        warnings.warn(text, FutureWarning, stacklevel=3)
    model, turn = options.get("model", ""), options.get("turn", "fair")
    order: OrderOption = options.get("order", "input")
    for name, value, allowed in (
        ("turn", turn, ("fair", "fifo")),
        ("order", order, ("input", "prefix", "auto")),
        ("priority", options.get("priority", 6), range(10)),
    ):
        if value not in allowed:
            raise BadOption(f"{name} {value!r}: give one of {', '.join(map(str, allowed))}")
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
        dedupe=options.get("dedupe", options.get("once", False)),
        order=order,
    )
    submission.check()
    return submission


def _deadline(deadline: Deadline | None) -> str:
    """Return a deadline in the form of the script CREATE (contract/lua/create.lua)."""
    if deadline is None:
        return ""
    if isinstance(deadline, dt.timedelta):
        if deadline <= dt.timedelta():
            raise BadOption(f"deadline {deadline}: give a duration above 0")
        return f"+{round(deadline.total_seconds() * 1000)}"
    if deadline.tzinfo is None:
        raise BadOption(
            f"deadline {deadline}: the time zone is missing; give one, for example dt.UTC"
        )
    return str(round(deadline.timestamp() * 1000))


class Client:
    """Submits requests to the queue and finds batches. Threads may share one client.

    Args:
        url: Redis's address. Default: the setting WARMQ_REDIS_URL.
        queue: base name of the queue. Default: the setting WARMQ_QUEUE.

    Raises:
        SettingsError: a setting is wrong.
    """

    def __init__(self, url: str | None = None, *, queue: str | None = None) -> None:
        given = {"redis_url": url, "queue": queue}
        self._settings = load(Settings, **{k: v for k, v in given.items() if v is not None})

    @cached_property
    def _store(self) -> BatchStore:
        return store_of(self._settings)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, from which another process opens its own connections."""
        return {"_settings": self._settings}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; batches continue to run."""
        if "_store" in self.__dict__:
            self._store.close()
            del self.__dict__["_store"]

    def submit(self, requests: Requests, **options: Unpack[SubmitOptions]) -> Batch:
        """Queue requests as one batch; return when all are queued. They run meanwhile.

        A wrong request becomes an error result; the other requests run. A call with the same
        `batch_id`, options and requests resumes an interrupted one; no request runs twice.

        Args:
            requests: any iterable of dicts; a data frame or table (pandas, polars, pyarrow) with a
                row for each request; or the path of a file: JSON lines, parquet, Arrow, CSV.
            options: see SubmitOptions.

        Raises:
            BadOption: an argument is wrong.
            BatchConflict: the batch exists with other requests or options.
            StoreUnavailable: Redis cannot be used; make the same call later to continue.
            Any error of iterating over `requests`; the batch stays open.
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
        """Return an existing batch of any submitter. Raises BatchConflict for an unknown id."""
        found = find_batch(self._store, self._settings, batch_id)
        return Batch(self._store, found, self._settings)

    def batches(self) -> list[Batch]:
        """Return all batches, newest first."""
        return [Batch(self._store, found, self._settings) for found in self._store.batches()]


def _source(requests: Any, columns: Mapping[str, str]) -> Source:
    """Return a source that reads the requests."""
    if isinstance(requests, str | os.PathLike):
        return open_source(os.fspath(requests), columns)
    if is_frame(requests):
        return frame_source(requests, columns)
    if isinstance(requests, Mapping) or not isinstance(requests, Iterable):
        kind = type(requests).__name__
        raise BadOption(
            f"requests: {kind} is not supported; give an iterable of dicts such as "
            '[{"prompt": "..."}], a data frame, or the path of a file'
        )
    to_line: ToLine = line_of
    extra: dict[str, Any] = {}
    if columns:
        known = getattr(requests, "column_names", None)  # of a data set; a streamed one has none
        mapping = RowMapping(columns, known if isinstance(known, list) else None)
        to_line, extra = mapping.line_of_values, {"what": "row", "columns": mapping.columns}
    if is_data_set(requests):
        to_line = unpadded(requests, to_line)
    return IterableSource(requests, to_line, **extra)
