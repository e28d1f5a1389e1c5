"""Which lines of a file go to which queue: by model, as workers announce what they serve."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import msgspec

from contract.errors import RequestRejected
from contract.openai.lines import Request
from gateway.batches.api.record import Part, Problem
from gateway.batches.runner.looking import model_of
from gateway.served import Served
from producer.input.reader import RawChunk


class _Body(msgspec.Struct):
    model: str = ""


_decode = msgspec.json.Decoder(_Body).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")


def waits(models: Iterable[str], served: Served, allowed: Collection[str] | None) -> bool:
    """Return whether a batch waits until a worker lives.

    One of which a model was configured does not: its lines call for a worker, and until they are
    queued no autoscaler sees them.
    """
    configured = set(served.configured.values())
    return not served.alive and not any(
        served.queue_of(model, allowed) in configured for model in models
    )


def outdated(
    models: Iterable[str], served: Served, allowed: Collection[str] | None
) -> list[Problem]:
    """Return why nothing of a batch is queued: of a model's workers none would see it."""
    found = [repr(model[:200]) for model in models if served.is_outdated(model, allowed)]
    if not found:
        return []
    told = (
        f"nothing was queued: all workers of model {', '.join(sorted(found)[:20])} are older than "
        "this gateway, and would not take what it queues; upgrade the workers, then send it again"
    )
    return [Problem("older_workers", told, "body.model")]


def parts_for(
    batch_id: str, models: Iterable[str], served: Served, allowed: Collection[str] | None
) -> list[Part]:
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
    told = served.told(allowed)
    if not by_queue:
        return [Part(batch_id, "", served.base, told=told)]
    names = [batch_id] if len(by_queue) == 1 else [f"{batch_id}.{n}" for n in range(len(by_queue))]
    return [
        Part(
            name, next(filter(None, models), ""), queue, models,
            named=unnamed if "" in models else "", all_served=all_served,
            told="" if all_served or n else told,
        )
        for n, (name, (queue, models)) in enumerate(
            zip(names, sorted(by_queue.items()), strict=True)
        )
    ]  # fmt: skip


def naming(line: bytes, model: str) -> bytes:
    """Return a line with the name of a model in its body, in place of none; all else is as it was.

    A line that is no request is returned as it is: it gets its error where it is checked.
    """
    if model_of(line):
        return line
    try:
        fields = _decode_fields(line)
        body = _decode_fields(fields["body"])
        if body.get("model", _NULL) != _NULL:  # no name: refused where it is checked
            return line
        body["model"] = msgspec.Raw(_encode(model))
        fields["body"] = msgspec.Raw(_encode(body))
        return _encode(fields)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, RecursionError):
        return line


class Sharing:
    """Tells the lines of one part of a file; what it does depends on file and parts alone."""

    def __init__(self, parts: list[Part], at: int) -> None:
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
                chunk.lines = [(number, naming(line, self._named)) for number, line in chunk.lines]
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
