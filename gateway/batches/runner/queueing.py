"""Assigns the lines of a file to queues, and queues them as `producer submit` does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from contract.batch import Batch
from contract.errors import BatchConflict, RequestRejected
from contract.openai.lines import Request
from gateway.batches.api.record import REUSE, STOP_AFTER, BatchError, BatchPart, BatchRecord
from gateway.batches.runner.input_file import Body, model_of, with_model
from gateway.batches.runner.row_errors import explained
from gateway.http.services import Services
from gateway.served_models import ServedModels
from producer.input.decompression import ReadHook
from producer.input.options import BadOption
from producer.input.reader import Input, RawChunk
from producer.submit.reuse import oldest_age_s
from producer.submit.submission import Submission, stop_after_text
from producer.submit.submit import Submitter, Summary

_decode = msgspec.json.Decoder(Body).decode


def waits_for_worker(
    models: Iterable[str], served: ServedModels, allowed: Collection[str] | None
) -> bool:
    """Return whether a batch must wait until a worker is alive.

    A batch with a model in WARMQ_GATEWAY_MODELS does not wait: autoscalers start workers for queued
    lines.
    """
    configured = set(served.configured.values())
    return not served.alive and not any(
        served.queue_of(model, allowed) in configured for model in models
    )


def older_workers_only(
    models: Iterable[str], served: ServedModels, allowed: Collection[str] | None
) -> list[BatchError]:
    """Return the problem of models that only workers of an older protocol serve, or []."""
    outdated = [repr(model[:200]) for model in models if served.is_outdated(model, allowed)]
    if not outdated:
        return []
    message = (
        f"nothing was queued: all workers of model {', '.join(sorted(outdated)[:20])} are older "
        "than this gateway, and would not take what it queues; upgrade the workers, then send it "
        "again"
    )
    return [BatchError("older_workers", message, "body.model")]


def parts_for(
    batch_id: str, models: Iterable[str], served: ServedModels, allowed: Collection[str] | None
) -> list[BatchPart]:
    """Return a batch's queue batches, one for each queue of its models; at least one.

    The first one also gets the lines whose model no worker serves, and refuses them. Lines that
    name no model get the caller's default model, unless the caller may use all models (`allowed` is
    None).
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
    listing = served.listing(allowed)
    if not by_queue:
        return [BatchPart(batch_id, "", served.base, served=listing)]
    names = [batch_id] if len(by_queue) == 1 else [f"{batch_id}.{n}" for n in range(len(by_queue))]
    return [
        BatchPart(
            name, next(filter(None, models), ""), queue, models,
            named=unnamed if "" in models else "", all_served=all_served,
            served="" if all_served or n else listing,
        )
        for n, (name, (queue, models)) in enumerate(
            zip(names, sorted(by_queue.items()), strict=True)
        )
    ]  # fmt: skip


class PartLines:
    """Selects a file's lines for one queue batch; every process selects the same ones."""

    def __init__(self, parts: list[BatchPart], index: int) -> None:
        self._part = part = parts[index]
        self._models_elsewhere = {
            model for each in parts if each is not part for model in each.models
        }
        self._takes_unknown = index == 0
        self._takes_all = len(parts) == 1
        self._models = frozenset(part.models)
        self._allowed = self._models - {""} | {part.named} if part.named else self._models

    def takes(self, line: bytes) -> bool:
        """Return whether a line belongs to this queue batch; a too long line comes as b''."""
        if self._takes_all:
            return True
        model = model_of(line)
        return model in self._models or (
            self._takes_unknown and model not in self._models_elsewhere
        )

    def chunks(self, raw: Iterable[RawChunk]) -> Iterator[RawChunk]:
        """Yield a file's chunks with only this batch's lines; those without a model get `named`."""
        named = self._part.named
        for chunk in raw:
            if not self._takes_all:
                chunk.lines = [line for line in chunk.lines if self.takes(line[1])]
                chunk.size = sum(len(line) for _, line in chunk.lines)
                for number in chunk.too_long.keys() - {number for number, _ in chunk.lines}:
                    del chunk.too_long[number]
            if named:
                chunk.lines = [(number, with_model(line, named)) for number, line in chunk.lines]
            yield chunk

    def check(self, request: Request) -> None:
        """Raise RequestRejected for a line whose model no worker serves."""
        try:
            model = _decode(request.body).model
        except (msgspec.DecodeError, RecursionError):
            model = ""
        if model in self._allowed:
            return
        served = self._part.served or "see GET /v1/models"
        if not model:
            message = f"field body.model: is missing; name a model; {served}"
            raise RequestRejected(message, code="missing_required_parameter", field="model")
        message = f"field body.model: there is no model {model[:200]!r} here; {served}"
        raise RequestRejected(message, code="model_not_found", field="model")


def _submission(record: BatchRecord, part: BatchPart) -> Submission:
    stop_after = ""
    with suppress(BadOption):  # an earlier version took any text
        stop_after = stop_after_text((record.metadata or {}).get(STOP_AFTER), STOP_AFTER)
    reuse_s = None
    with suppress(BadOption):
        reuse_s = oldest_age_s((record.metadata or {}).get(REUSE), REUSE)
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
        stop_after=stop_after,
        reuse_s=reuse_s if record.order == "input" else None,
    )


def create_part(
    services: Services, record: BatchRecord, part: BatchPart, *, ends: bool = False
) -> Batch:
    """Create or find a queue batch; with `ends` it is created only to be ended."""
    planned = record.order != "input"
    return _submission(record, part).create(
        services.batches, record.input_file_id, planned=planned, ends=ends, over_http=True
    )


def submit_part(
    services: Services, record: BatchRecord, index: int, path: Path,
    report: Callable[[Summary], None], watch: ReadHook | None = None,
) -> None:  # fmt: skip
    """Queue the remaining lines of a queue batch, and seal it (mark it as complete).

    `report` and `watch` may raise to stop this function.

    Raises:
        BatchConflict: The queue batch has ended or was deleted meanwhile.
        InputUnreadable: The file is damaged.
        StoreUnavailable: Redis does not answer; the next call continues.
    """
    part, settings = record.parts[index], services.settings
    lines, submission = PartLines(record.parts, index), _submission(record, part)
    batch = services.batches.batch(part.batch_id)
    if batch is None:
        raise BatchConflict(f"batch {part.batch_id} was deleted meanwhile")
    if batch.sealed:
        return
    check = None if part.all_served and not part.named else lines.check
    # The file was validated before its queue batches were created: its custom_ids are unique.
    submitter = Submitter(services.batches, settings, submission, batch, report, check, unique=True)
    with closing(Input(str(path), watch=watch)) as source:
        raw = source.chunks(submission.seed, settings.max_line_bytes)
        submitter.run(explained(lines.chunks(raw)))
