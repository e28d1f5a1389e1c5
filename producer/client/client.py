"""The client: submits requests, and finds batches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol, Self, Unpack

from contract.errors import BatchConflict
from contract.nearest import did_you_mean
from contract.redis.batches import BatchStore
from contract.redis.connect import masked
from contract.settings import Settings, load
from producer.client.batch import Batch, store_of
from producer.client.options import SubmitOptions, submission_of
from producer.input.items import Items
from producer.input.options import BadOption, check_own_sources
from producer.input.source import Source
from producer.input.sources import open_source
from producer.input.tables.data_sets import is_data_set, unpadded
from producer.input.tables.frames import frame_source, is_frame
from producer.input.tables.mapping import RowMapping
from producer.queue_workers import refuse_older_workers
from producer.remedies import worded
from producer.submit.resuming import Resuming


class SupportsArrow(Protocol):
    """A data frame or table of any library that speaks Arrow."""

    def __arrow_c_stream__(self, requested_schema: object | None = None, /) -> object:
        """Return a capsule of an Arrow stream."""


#: A request as a line of a file has it, `{"prompt": ...}`, `{"messages": ...}` or OpenAI's form.
Request = Mapping[str, Any]
Requests = Iterable[Request] | SupportsArrow | str | os.PathLike[str]


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
        with worded():
            submission = submission_of(options, self._settings)
            source = _source(requests, options.get("columns", {}))
            check_own_sources(options.get("fields", {}), source, "fields")
            if submission.order == "prefix" and not source.repeatable:
                raise BadOption(
                    "order 'prefix' is planned from all requests, and these can be iterated only "
                    "once: give a list, or leave it out"
                )
            submission.check_deadline(self._store)
            refuse_older_workers(self._store, submission.queue)
            resuming = Resuming(self._store, self._settings, submission, source)
            return Batch(self._store, resuming.submit().batch, self._settings, resuming)

    def batch(self, batch_id: str) -> Batch:
        """Return a batch that is there, whoever has submitted it.

        Raises:
            BatchConflict: there is none of that id.
        """
        found = self._store.batch(batch_id)
        if found is None:
            where = masked(self._settings.redis_url.get_secret_value())
            near = did_you_mean(batch_id, self._store.newest_ids())
            raise BatchConflict(f"there is no batch {batch_id} (any more) in {where}{near}")
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
    known = getattr(requests, "column_names", None)  # of a data set; a streamed one may not know
    if is_data_set(requests):
        requests = unpadded(requests)
    if not columns:
        return Items(requests)
    mapping = RowMapping(columns, known if isinstance(known, list) else None)
    return Items(requests, mapping.line_of_values, what="row", columns=mapping.columns)
