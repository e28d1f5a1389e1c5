"""Which lines of a file go to which queue: by model, as workers announce what they serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from contract.errors import RequestRejected
from contract.naming import queue_name
from contract.openai.lines import Request
from contract.redis.reads import is_alive
from producer.core.reader import RawChunk
from producer.gateway.batches.record import Part
from producer.gateway.carrying.looking import model_of


class _Body(msgspec.Struct):
    model: str = ""


_decode = msgspec.json.Decoder(_Body).decode


def queues_by_model(
    announced: Iterable[Mapping[str, Any]], base: str, configured: str
) -> dict[str, str] | None:
    """Return the queue of each model that workers serve; None while no worker lives.

    A worker that was heard within the last minute counts, too: it may be starting again. '' is
    the queue of lines that name no model; `*` that of all models that nobody names.
    """
    workers = list(announced)
    if not any(map(is_alive, workers)):
        return None
    found = {name: queue for worker in workers for name, queue in _names(worker, base)}
    for name in filter(None, map(str.strip, configured.split(","))):
        found.setdefault(name, queue_name(name, base))
    queues = set(found.values())
    if base in queues or len(queues) == 1:
        found[""] = base if base in queues else next(iter(queues))
    return found


def _names(worker: Mapping[str, Any], base: str) -> Iterator[tuple[str, str]]:
    queue, model, adapters = worker["queue"], worker.get("model"), worker.get("adapters")
    if queue.startswith(f"{base}."):
        yield queue.removeprefix(f"{base}."), queue
    elif queue != base:
        return  # another installation's
    elif isinstance(model, str) and model:
        yield model, queue
        yield PurePath(model).name, queue  # a folder's: gateways do not show where it is
    else:
        yield "*", queue
    for adapter in adapters if isinstance(adapters, list) else ():
        yield str(adapter), queue


def parts_for(
    batch_id: str, models: Iterable[str], queues: Mapping[str, str],
    may_use: Callable[[str], bool], base: str,
) -> list[Part]:  # fmt: skip
    """Return the parts of a batch: one for each queue, of the models that are asked for there.

    Lines of other models are the first part's, which refuses them; there is always one.
    """
    by_queue: dict[str, list[str]] = {}
    all_served = True
    for model in sorted(models):
        queue = queues.get(model) or queues.get("*")
        if queue is not None and (may_use(model) or not model):
            by_queue.setdefault(queue, []).append(model)
        else:
            all_served = False
    if not by_queue:
        return [Part(batch_id, "", base)]
    names = [batch_id] if len(by_queue) == 1 else [f"{batch_id}.{n}" for n in range(len(by_queue))]
    return [
        Part(name, next(filter(None, models), ""), queue, models, all_served)
        for name, (queue, models) in zip(names, sorted(by_queue.items()), strict=True)
    ]


class Sharing:
    """Tells the lines of one part of a file; what it does depends on file and parts alone."""

    def __init__(self, parts: list[Part], at: int) -> None:
        self._part = parts[at]
        others = [part for part in parts if part is not parts[at]]
        self._others = {model for part in others for model in part.models}
        self._takes_unknown = at == 0
        self._all = len(parts) == 1
        self._models = frozenset(self._part.models)

    def takes(self, line: bytes) -> bool:
        """Return whether a line is this part's; '' stands for one that was too long."""
        if self._all:
            return True
        model = model_of(line)
        return model in self._models or (self._takes_unknown and model not in self._others)

    def chunks(self, raw: Iterable[RawChunk]) -> Iterator[RawChunk]:
        """Yield a file's chunks with this part's lines only; their digests are the file's."""
        for chunk in raw:
            if not self._all:
                chunk.lines = [line for line in chunk.lines if self.takes(line[1])]
                chunk.size = sum(len(line) for _, line in chunk.lines)
                for number in chunk.too_long.keys() - {number for number, _ in chunk.lines}:
                    del chunk.too_long[number]
            yield chunk

    def check(self, request: Request) -> None:
        """Raise RequestRejected for a line whose model nobody serves."""
        try:
            model = _decode(request.body).model
        except msgspec.DecodeError:
            model = ""
        if model in self._models:
            return
        if not model:
            told = "field body.model: is missing; name one of the models of GET /v1/models"
            raise RequestRejected(told, code="missing_required_parameter", field="model")
        told = f"field body.model: there is no model {model[:200]!r} here; see GET /v1/models"
        raise RequestRejected(told, code="model_not_found", field="model")
