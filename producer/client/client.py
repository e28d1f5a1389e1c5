"""The client of the Python library: submits requests, and finds batches."""

from __future__ import annotations

import datetime as dt
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, Self, TypedDict, Unpack

import orjson

from contract.batch import Batch as QueuedBatch
from contract.naming import DEFAULT_TENANT, queue_name
from contract.redis.batches import BatchStore
from contract.settings import Settings, load
from producer.batch_watch import find_batch
from producer.client.batch import Batch, store_of
from producer.client.trial import Trial
from producer.input.iterable import JSON, IterableSource, ToLine, columns_of, line_of
from producer.input.options import (
    BadOption,
    check_column_conflicts,
    check_field_conflicts,
    check_fields,
)
from producer.input.source import Source, open_source
from producer.input.structured import Schema, with_structure
from producer.input.tables.frames import (
    frame_source,
    is_data_set,
    is_frame,
    is_series,
    series_frame,
    unpadded,
)
from producer.input.tables.kept import listed
from producer.input.tables.mapping import RowMapping
from producer.input.tables.output_types import InputColumns
from producer.queue_workers import QueueWorkers, refuse_older_workers, unserved_text
from producer.redis import NotifySecret
from producer.remedies import add_remedies
from producer.run.trial import MOST_ROWS, ROWS, Spread, measured_plan
from producer.run.trial import Trial as QueuedTrial
from producer.submit.prompt_tokens import CharacterCounter
from producer.submit.resumable import ResumableSubmit
from producer.submit.reuse import oldest_age_s
from producer.submit.routes import routed, to_default_queue
from producer.submit.submission import (
    OrderOption,
    Submission,
    new_batch_id,
    stop_after_text,
)
from producer.time_left import OutlookReads


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

    columns: for rows that are not requests, the column of each field, or a template over columns,
        or a constant. Examples: `{"prompt": "text"}`, `{"messages.user": "Translate: {text}"}`.
    keep: columns for the results (`Result.kept`), or `all`.
    delimiter: the character between the cells of a CSV file, if it is not a comma.
    batch_id: id of the batch. The id of an existing batch resumes its submit. Default: a new id.
    model: served model to send the requests to. Default: the one that each request names.
    fields: body fields of every request. Example: `{"max_tokens": 256}`.
    choice: the texts that answers may be. Example: `["good", "bad"]`.
    schema: JSON schema of all answers: a dict, a file's path, or a class of pydantic's.
    priority: 0 (most urgent) to 9, in steps of 3. Default: 6.
    tenant: tenant of the requests.
    turn: `fair` takes turns with the tenant's other batches, `fifo` waits for earlier `fifo` ones.
    deadline: when unfinished requests expire: a time, or a duration from the batch's creation.
    dedupe: run requests with the same body once, if their temperature is 0. `once` is its old name.
    reuse: answer requests from known answers to the same body; "7d": only from answers that are not
        older. Workers note answers with WARMQ_KNOWN_ANSWERS.
    order: `prefix` groups requests with a common beginning, `auto` does so if that saves prompt
        tokens. `prefix` needs requests that can be iterated again.
    stop_after_failures: cancel the batch when so many requests have failed, for example 100; or a
        share, for example "5%", from 100 ended requests on.
    notify: URL to which a worker posts a webhook at the batch's end. `Client.webhook_secret`
        verifies the webhook.
    """

    columns: Mapping[str, str]
    keep: str | Sequence[str]
    delimiter: str
    batch_id: str | None
    model: str
    fields: Mapping[str, Any]
    choice: str | Iterable[str] | None
    schema: Schema | None
    priority: int
    tenant: str
    turn: Literal["fair", "fifo"]
    deadline: Deadline | None
    dedupe: bool
    once: bool
    reuse: bool | str
    order: OrderOption
    stop_after_failures: int | str | None
    notify: str


def submission_of(options: SubmitOptions, settings: Settings) -> Submission:
    """Return the submission for these options; raise BadOption if one is wrong."""
    if unknown := sorted(options.keys() - SubmitOptions.__annotations__.keys()):
        names = ", ".join(SubmitOptions.__annotations__)
        raise BadOption(f"{unknown[0]} is not an option of submit; the options are {names}")
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
    fields = _json_fields(options.get("fields", {}))
    check_fields(fields)
    fields = with_structure(fields, options.get("choice"), options.get("schema"))
    submission = Submission(
        options.get("batch_id") or new_batch_id(),
        queue_name(model or None, settings.queue),
        options.get("priority", 6),
        model,
        fields,
        _deadline_text(options.get("deadline")),
        tenant=options.get("tenant", DEFAULT_TENANT),
        in_order=turn == "fifo",
        dedupe=options.get("dedupe", options.get("once", False)),
        order=order,
        stop_after=stop_after_text(options.get("stop_after_failures"), "stop_after_failures"),
        notify=options.get("notify", ""),
        keep=_keep_of(options),
        reuse_s=oldest_age_s(options.get("reuse"), "reuse"),
    )
    submission.check()
    return submission


def _json_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as JSON values; raise BadOption for a value that JSON cannot express."""
    converted = {}
    for name, value in fields.items():
        try:
            converted[name] = orjson.loads(orjson.dumps(value, option=JSON))
        except TypeError as error:
            raise BadOption(
                f"fields {name}: cannot be written as JSON: {error}; give texts, numbers, lists "
                "and dicts"
            ) from None
    return converted


def _deadline_text(deadline: Deadline | None) -> str:
    """Return a deadline as the script CREATE takes it (contract/lua/create.lua)."""
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
        values = {"redis_url": url, "queue": queue}
        self._settings = load(Settings, **{k: v for k, v in values.items() if v is not None})

    @cached_property
    def _store(self) -> BatchStore:
        return store_of(self._settings)

    def __getstate__(self) -> dict[str, Any]:
        """Return for pickle the settings, from which a process opens its own connections."""
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

    @property
    def webhook_secret(self) -> str:
        """The secret that verifies the webhooks of `notify`. Raises StoreUnavailable."""
        return NotifySecret.using(self._store).get()

    def submit(self, requests: Requests, **options: Unpack[SubmitOptions]) -> Batch:
        """Queue requests as one batch; return when all are queued. Workers run them meanwhile.

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
            submission, source = self._submission_and_source(requests, options)
            _warn_of_unused(source, options)
            if submission.order == "prefix" and not source.repeatable:
                raise BadOption(
                    "order 'prefix' is planned from all requests, and these can be iterated only "
                    "once: give a list, or leave order out"
                )
            submission.check_deadline(self._store)
            submission = to_default_queue(submission, self._store, self._settings.queue)
            refuse_older_workers(self._store, submission.queue)
            submission = routed(submission, self._store, self._settings.queue)
            resuming = ResumableSubmit(self._store, self._settings, submission, source)
            batch = resuming.submit().batch
            self._warn_if_unserved(batch, submission.model)
            return Batch(self._store, batch, self._settings, resuming)

    def _warn_if_unserved(self, batch: QueuedBatch, model: str) -> None:
        """Warn of each queue of an unfinished batch that no worker serves.

        The command line's --model is `model` of this library.
        """
        for queue in () if batch.finished else batch.queues:
            if self._store.workers(queue):
                continue
            text, base = "", self._settings.queue
            if queue == queue_name(model or None, base):
                text = unserved_text(self._store, base, model)
            text = text.replace("--model ", "model=").replace("--model", "model")
            text = text or QueueWorkers(self._store, queue).text()
            warnings.warn(f"{batch.id}: {text}; the requests wait there", UserWarning, stacklevel=3)

    def _submission_and_source(
        self, requests: Requests, options: SubmitOptions
    ) -> tuple[Submission, Source]:
        submission = submission_of(options, self._settings)
        columns, delimiter = options.get("columns", {}), options.get("delimiter", "")
        source = _source(requests, columns, _keep_of(options), delimiter)
        check_column_conflicts(options.get("fields", {}), source, "fields")
        return submission, source

    def try_rows(
        self, requests: Requests, rows: int = ROWS, **options: Unpack[SubmitOptions]
    ) -> Trial:
        """Run a few of the requests now, spread evenly, and return their answers and a plan of all.

        They run before all other requests, as a batch of their own. The batch is removed at the
        end, also after Ctrl-C. The call waits for their answers; a worker must run.

        Args:
            requests, options: as of `submit`; the requests must be iterable again.
            rows: number of requests to run, up to 100.

        Raises:
            BadOption: an argument is wrong.
            BatchConflict: there are no requests.
            StoreUnavailable: Redis cannot be used.
        """
        return self._try_rows(requests, rows, time.sleep, options)

    def _try_rows(
        self,
        requests: Requests,
        rows: int,
        sleep: Callable[[float], None],
        options: SubmitOptions,
    ) -> Trial:
        from producer.submit.plan import plan  # noqa: PLC0415 - loads numpy

        if type(rows) is not int or not 0 < rows <= MOST_ROWS:
            raise BadOption(f"rows {rows!r}: give a number from 1 to {MOST_ROWS}")
        with add_remedies():
            submission, source = self._submission_and_source(requests, options)
            if not source.repeatable:
                raise BadOption(
                    "requests: these can be iterated only once, and a trial would leave none for "
                    "submit: give a list, a frame or a file"
                )
            store, spread = self._store, Spread(rows)
            submission = to_default_queue(submission, store, self._settings.queue)
            refuse_older_workers(store, submission.queue)
            submission = routed(submission, store, self._settings.queue)
            workers = store.workers(submission.queue)
            outlook = OutlookReads.using(store).outlook_of([submission.queue], workers)
            estimate = plan(
                self._settings, submission, source, CharacterCounter(), workers, outlook,
                watch=spread.watch,
            )  # fmt: skip
            with QueuedTrial(store, self._settings, submission, spread) as trial:
                trial.begin(source.name)
                tried = list(trial.follow(sleep))
            return Trial.of(tried, measured_plan(estimate, tried))

    def batch(self, batch_id: str) -> Batch:
        """Return an existing batch of any submitter. Raises BatchNotFound for an unknown id."""
        found = find_batch(self._store, self._settings, batch_id)
        return Batch(self._store, found, self._settings)

    def batches(self) -> list[Batch]:
        """Return all batches, newest first."""
        return [Batch(self._store, found, self._settings) for found in self._store.batches()]


def _warn_of_unused(source: Source, options: SubmitOptions) -> None:
    """Warn of a table's columns that are neither used nor kept."""
    if source.unused and not options.get("columns"):
        text = f"{source.name}: columns not used: {listed(source.unused)}; keep them by keep="
        warnings.warn(text, UserWarning, stacklevel=3)


def _keep_of(options: SubmitOptions) -> tuple[str, ...]:
    keep = options.get("keep", ())
    return (keep,) if isinstance(keep, str) else tuple(keep)


def _source(
    requests: Any, columns: Mapping[str, str], keep: Sequence[str] = (), delimiter: str = ""
) -> Source:
    """Return a source that reads the requests."""
    if isinstance(requests, str | os.PathLike):
        return open_source(os.fspath(requests), columns, keep, delimiter=delimiter)
    if delimiter:
        raise BadOption("delimiter: only CSV files have one; leave it out")
    if is_series(requests):
        requests, columns = series_frame(requests, columns)
    if is_frame(requests):
        return frame_source(requests, columns, keep)
    if isinstance(requests, Mapping) or not isinstance(requests, Iterable):
        kind = type(requests).__name__
        raise BadOption(
            f"requests: {kind} is not supported; give an iterable of dicts such as "
            '[{"prompt": "..."}], a data frame, or the path of a file'
        )
    to_line: ToLine = line_of
    more: dict[str, Any] = {}
    rows = requests
    if columns or keep:
        names, guessed, rows = columns_of(requests)
        mapping = RowMapping(columns, names, keep, guessed=guessed)
        to_line, more = mapping.line_of_values, {"what": "row", "columns": mapping.columns}
        more |= {"output_columns": InputColumns.text_of(mapping.kept.names, "", None)}
    if is_data_set(requests):
        to_line = unpadded(requests, to_line)
    return IterableSource(rows, to_line, **more)
