"""Reads the records of batches made over HTTP, which the gateways write, for commands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import orjson

from contract.batch import WHOLE_SECONDS, Batch
from contract.errors import BatchConflict
from contract.failures import failures_of, wrong_count, wrong_text
from contract.redis.batches import BatchStore
from contract.redis.objects import ENDED, Objects
from contract.redis.reads import PAGE, Reads

#: The beginnings of the ids of batches made over HTTP, and the end of the id of a queue batch if
#: such a batch has several.
_PREFIXES, _PART = ("batch_", "msgbatch_"), re.compile(r"\.\d+$")
#: The key of the unfinished batches, and of those that have just ended (contract/redis/due.py).
_DUE = "warmq:gateway:due:batch"
Document = dict[str, Any]


class HttpBatches(Reads):
    """Reads records of batches made over HTTP. Calls raise StoreUnavailable."""

    def shown(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return batches with the times that the API shows, which are those of the records."""
        records = self._records(batch.id for batch in batches if _may_be_over_http(batch))
        return [_with_times(batch, records.get(batch.id)) for batch in batches]

    def with_file_name(self, batch: Batch) -> Batch:
        """Return a batch made over HTTP with its file's name before the file's id."""
        file_id = batch.fields.get("input", "")
        stored = None
        if _may_be_over_http(batch):
            (stored,) = Objects.using(self).get_many("file", [file_id])
        name = orjson.loads(stored.document).get("filename") if stored is not None else None
        if not name:
            return batch
        return replace(batch, fields=batch.fields | {"input": f"{name} ({file_id})"})

    def waiting(self, queued: Iterable[str]) -> list[Batch]:
        """Return the unfinished batches without a queue batch; `queued` has all queue batches' ids.

        They are validated, or wait for a worker.
        """
        taken = {_record_id(one) for one in queued}
        due = [name.decode() for name in self._client.zrange(_DUE, 0, -1)]
        records = self._records(name for name in due if name not in taken)
        return [
            _waiting(name, record)
            for name, record in records.items()
            if record.get("status", "validating") not in ENDED
        ]

    def refuse_retry(self, batch: Batch) -> None:
        """Raise BatchConflict for a batch made over HTTP: its files must not change."""
        name = _record_id(batch.id)
        if "over_http" not in batch.fields and not self._records([batch.id]):
            return
        how = f"the page /ui/batches/{name} does so ('Retry') when it has ended"
        if name.startswith("msgbatch_"):
            how = "POST /v1/messages/batches"
        again = f"run its failed lines as a new batch; {how}"
        codes = failures_of([batch])
        if text := wrong_text(codes):
            text += ", and send the correction as a new batch"
            all_wrong = batch.finished and batch.id == name
            all_wrong &= wrong_count(codes) == batch.terminal - batch.number("completed")
            again = text if all_wrong else f"{again}; {text}"
        raise BatchConflict(f"batch {batch.id} was made over HTTP, and ends only once: {again}")

    def ended(self, batch_ids: Iterable[str]) -> set[str]:
        """Return those of these queue batches whose batch over HTTP has ended."""
        records = self._records(batch_ids)
        return {name for name, record in records.items() if record.get("status") in ENDED}

    def _records(self, batch_ids: Iterable[str]) -> dict[str, Document]:
        """Return the records by the ids of queue batches, without those that have none."""
        names = {one: _record_id(one) for one in batch_ids if one.startswith(_PREFIXES)}
        wanted = list(dict.fromkeys(names.values()))
        found: dict[str, Document] = {}
        for start in range(0, len(wanted), PAGE):
            stored = Objects.using(self).get_many("batch", wanted[start : start + PAGE])
            found |= {one.id: orjson.loads(one.document) for one in stored if one is not None}
        return {one: found[name] for one, name in names.items() if name in found}


def with_http_batches(store: BatchStore, queued: Sequence[Batch]) -> list[Batch]:
    """Return all batches as commands show them, newest first; `queued` has all queue batches."""
    reads = HttpBatches.using(store)
    found = [*reads.shown(queued), *reads.waiting(batch.id for batch in queued)]
    return sorted(found, key=lambda batch: int(batch.created), reverse=True)


def retry_letters(store: BatchStore, ids: Sequence[str] | None) -> tuple[int, list[str]]:
    """Queue dead letters again (None: all), except those of ended batches made over HTTP.

    Returns:
        The number of those queued, and the ids of the excepted ones.
    """
    batch_of = {
        letter["id"]: letter["batch_id"] or ""
        for letter in store.dead_letters(ids)
        if (letter["batch_id"] or "").startswith(_PREFIXES)
    }
    ended = HttpBatches.using(store).ended(set(batch_of.values()))
    excepted = [name for name, batch_id in batch_of.items() if batch_id in ended]
    if excepted:
        chosen = [letter["id"] for letter in store.dead_letters(ids)]
        ids = [name for name in chosen if name not in set(excepted)]
    return store.retry_dead(ids), excepted


def _record_id(batch_id: str) -> str:
    return _PART.sub("", batch_id) if batch_id.startswith(_PREFIXES) else batch_id


def _may_be_over_http(batch: Batch) -> bool:
    # Gateways of 0.2.0 wrote no field `over_http`.
    return "over_http" in batch.fields or batch.id.startswith(_PREFIXES)


def _with_times(batch: Batch, record: Document | None) -> Batch:
    if record is None:
        return batch
    changed_at = record.get("changed_at", {})
    times = {
        "created_at": record["created_at"],
        "in_progress_at": changed_at.get("in_progress"),
        "finished_at": changed_at.get(record.get("status")) if batch.finished else None,
    }
    if record.get("status") not in ENDED:
        del times["finished_at"]
    new = {name: str(at_s * 1000) for name, at_s in times.items() if at_s is not None}
    return replace(batch, fields=batch.fields | new | {WHOLE_SECONDS: "1"})


def _waiting(name: str, record: Document) -> Batch:
    """Return a batch without a queue batch in the form of one."""
    fields = {
        "created_at": str(record["created_at"] * 1000),
        "deadline": str(record["expires_at"] * 1000),
        "input": record["input_file_id"],
        "model": record.get("model", ""),
        "over_http": "1",
        "queue": "",
        "tenant": record["tenant"],
        "total": str(record.get("counts", {}).get("total", 0)),
    }
    if record.get("status") == "cancelling":
        fields["cancelling"] = "1"
    return Batch(name, fields)
