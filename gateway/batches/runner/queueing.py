"""Which lines of a file go to which queue, as workers announce what they serve, and their way
there: as `producer submit` queues them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from contract.batch import Batch
from contract.errors import BatchConflict, RequestRejected
from contract.openai.lines import Request
from gateway.batches.api.record import BatchError, BatchPart, BatchRecord
from gateway.batches.runner.input_file import Body, model_of, with_model
from gateway.http.services import Services
from gateway.served_models import ServedModels
from producer.input.decompression import ReadHook
from producer.input.reader import Input, RawChunk
from producer.submit.submission import Submission
from producer.submit.submit import Submitter, Summary

_decode = msgspec.json.Decoder(Body).decode


def waits(models: Iterable[str], served: ServedModels, allowed: Collection[str] | None) -> bool:
    """Return whether a batch waits until a worker lives.

    One of which a model was configured does not: its lines call for a worker, and until they are
    queued no autoscaler sees them.
    """
    configured = set(served.configured.values())
    return not served.alive and not any(
        served.queue_of(model, allowed) in configured for model in models
    )


def outdated(
    models: Iterable[str], served: ServedModels, allowed: Collection[str] | None
) -> list[BatchError]:
    """Return why nothing of a batch is queued: of a model's workers none would see it."""
    found = [repr(model[:200]) for model in models if served.is_outdated(model, allowed)]
    if not found:
        return []
    told = (
        f"nothing was queued: all workers of model {', '.join(sorted(found)[:20])} are older than "
        "this gateway, and would not take what it queues; upgrade the workers, then send it again"
    )
    return [BatchError("older_workers", told, "body.model")]


def parts_for(
    batch_id: str, models: Iterable[str], served: ServedModels, allowed: Collection[str] | None
) -> list[BatchPart]:
    """Return the parts of a batch: one for each queue, of the models that are asked for there.

    Lines of other models are the first part's, which refuses them; there is always one. Lines that
    name no model are given the name of one, unless the caller may use all (`allowed` is None).
    """
    unnamed = served.default_of(allowed)
    by_queue: dict[str, list[str]] = {}
    all_served = True
    for model in sorted(models):
        queue = served.queue_of(model, allowed)
        if queue is not None:
            by_queue.setdefault(queue, []).append(model)
        else:
            all_served = False
    told = served.listing(allowed)
    if not by_queue:
        return [BatchPart(batch_id, "", served.base, told=told)]
    names = [batch_id] if len(by_queue) == 1 else [f"{batch_id}.{n}" for n in range(len(by_queue))]
    return [
        BatchPart(
            name, next(filter(None, models), ""), queue, models,
            named=unnamed if "" in models else "", all_served=all_served,
            told="" if all_served or n else told,
        )
        for n, (name, (queue, models)) in enumerate(
            zip(names, sorted(by_queue.items()), strict=True)
        )
    ]  # fmt: skip


class PartLines:
    """Tells the lines of one part of a file; what it does depends on file and parts alone."""

    def __init__(self, parts: list[BatchPart], at: int) -> None:
        self._part = parts[at]
        others = [part for part in parts if part is not parts[at]]
        self._others = {model for part in others for model in part.models}
        self._takes_unknown = at == 0
        self._all = len(parts) == 1
        self._models = frozenset(self._part.models)
        self._named, self._told = self._part.named, self._part.told or "see GET /v1/models"
        self._asked = self._models - {""} | {self._named} if self._named else self._models

    def takes(self, line: bytes) -> bool:
        """Return whether a line is this part's; '' stands for one that was too long."""
        if self._all:
            return True
        model = model_of(line)
        return model in self._models or (self._takes_unknown and model not in self._others)

    def chunks(self, raw: Iterable[RawChunk]) -> Iterator[RawChunk]:
        """Yield a file's chunks with this part's lines only; their digests are the file's.

        Lines that name no model are given one, where the part has one for them.
        """
        for chunk in raw:
            if not self._all:
                chunk.lines = [line for line in chunk.lines if self.takes(line[1])]
                chunk.size = sum(len(line) for _, line in chunk.lines)
                for number in chunk.too_long.keys() - {number for number, _ in chunk.lines}:
                    del chunk.too_long[number]
            if self._named:
                chunk.lines = [
                    (number, with_model(line, self._named)) for number, line in chunk.lines
                ]
            yield chunk

    def check(self, request: Request) -> None:
        """Raise RequestRejected for a line whose model nobody serves."""
        try:
            model = _decode(request.body).model
        except (msgspec.DecodeError, RecursionError):
            model = ""
        if model in self._asked:
            return
        if not model:
            told = f"field body.model: is missing; name a model; {self._told}"
            raise RequestRejected(told, code="missing_required_parameter", field="model")
        told = f"field body.model: there is no model {model[:200]!r} here; {self._told}"
        raise RequestRejected(told, code="model_not_found", field="model")


def submission_of(record: BatchRecord, part: BatchPart) -> Submission:
    """Return what shapes the messages of a part: the record and nothing else."""
    return Submission(
        part.batch_id,
        part.queue,
        record.priority,
        part.model,
        deadline=str(record.expires_at * 1000),
        tenant=record.tenant,
        dedupe=record.once,
        order=record.order,
        parent_traceparent=record.traceparent,
    )


def create_part(
    services: Services, record: BatchRecord, part: BatchPart, *, ends: bool = False
) -> Batch:
    """Make a part's batch of the queue, or find it; one that `ends` is made for that alone."""
    planned = record.order != "input"
    return submission_of(record, part).create(
        services.batches, record.input_file_id, planned=planned, ends=ends
    )


def submit_part(
    services: Services, record: BatchRecord, at: int, path: Path,
    report: Callable[[Summary], None], watch: ReadHook | None = None,
) -> None:  # fmt: skip
    """Queue what is not queued yet of a part that was made, and seal it; `watch` may raise to end
    that.

    Raises:
        BatchConflict: the part was ended or deleted meanwhile.
        InputUnreadable: the file is damaged.
        StoreUnavailable: Redis does not answer; it goes on where it was.
    """
    part, settings = record.parts[at], services.settings
    sharing, submission = PartLines(record.parts, at), submission_of(record, part)
    batch = services.batches.batch(part.batch_id)
    if batch is None:
        raise BatchConflict(f"batch {part.batch_id} was deleted meanwhile")
    if batch.sealed:
        return
    check = None if part.all_served and not part.named else sharing.check
    # What has parts was looked through: no custom_id is there twice.
    submitter = Submitter(services.batches, settings, submission, batch, report, check, unique=True)
    with closing(Input(str(path), watch=watch)) as source:
        raw = source.chunks(submission.seed, settings.max_line_bytes)
        submitter.run(sharing.chunks(raw))
