"""Which models there are, by what workers announce and the operator has named, and in which queue
each is asked for: the same for online requests and for the lines of batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from contract.naming import queue_name
from contract.redis.announcements import is_alive, protocol_of
from contract.version import PROTOCOL

#: The name of what a worker of the default queue serves that does not name its model.
UNNAMED = "default"
#: An error tells so many names of models, and so much of each.
_NAMES_TOLD, _NAME_CHARS = 20, 200


def configured_models(text: str) -> dict[str, str]:
    """Return the model whose workers answer to each name of WARMQ_GATEWAY_MODELS.

    `a` is a model with a queue of its own, `b=a` another name that its workers answer to, as an
    adapter, and `c=` one of the default queue's workers.

    Raises:
        ValueError: an entry has no name.
    """
    found = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, is_other, model = entry.rpartition("=")
        name = name.strip()
        if is_other and not name:
            raise ValueError(f"{entry!r} has no name; write NAME, NAME=MODEL or NAME=, by commas")
        found[name or entry] = model.strip() if is_other else entry
    return found


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What was known of models at one moment."""

    base: str
    #: What workers answer to, and the operator's names, each with its queue.
    names: Mapping[str, str]
    configured: Mapping[str, str]
    #: Names in queues where all living workers speak an older protocol: they would not see what is
    #: queued there.
    outdated: Collection[str]
    #: Whether a worker lives that would see it, in any queue.
    alive: bool
    #: Names of what a queue's workers run by default: none of an adapter.
    own: Collection[str] = ()

    @classmethod
    def of(cls, announced: Iterable[Mapping[str, Any]], base: str, configured: str) -> ServedModels:
        """Return what these announcements say, of the workers of a default queue and those beside.

        Whose announcements count, those who were heard lately or those who live, the caller says.
        """
        workers = [each for each in announced if _is_ours(each, base)]
        current = {each["queue"] for each in workers if protocol_of(each) >= PROTOCOL}
        older = {each["queue"] for each in workers if is_alive(each)} - current
        known = [(name, each["queue"]) for each in workers for name in _names(each, base)]
        models = configured_models(configured)
        named = {name: queue_name(model, base) for name, model in models.items()}
        return cls(
            base=base,
            names={name: queue for name, queue in known if queue not in older},
            configured={name: queue for name, queue in named.items() if queue not in older},
            outdated={name for name, queue in (*known, *named.items()) if queue in older},
            alive=any(is_alive(each) and protocol_of(each) >= PROTOCOL for each in workers),
            own={
                *(name for each in workers for name in _own_names(each, base)),
                *(name for name, model in models.items() if model in ("", name)),
            },
        )

    def queue_of(self, name: str, allowed: Collection[str] | None) -> str | None:
        """Return the queue in which a model is asked for, for '' that of the only one there is.

        `allowed` are the caller's models, None for all. None is returned where nobody serves it.
        """
        if not name:
            if allowed is not None:
                name = self.default_of(allowed)
                return self.queue_of(name, allowed) if name else None
            return self._only(self.names) or self._only(self.configured)
        if allowed is not None and name not in allowed:
            return None
        if found := self.names.get(name) or self.configured.get(name):
            return found
        # A worker that does not name its model runs what is asked for under any name.
        takes_any = self.names.get(UNNAMED) == self.base and name not in self.outdated
        return self.base if takes_any else None

    def default_of(self, allowed: Collection[str] | None) -> str:
        """Return which of a caller's models is asked for where a request names none, '' if that is
        not clear: the only one, or what the default queue, or the only queue of them, runs.

        It is to be named to the worker, which else runs what it has, also where that is none of the
        caller's models but one of them is its adapter. Who may use all (None) need name none.
        """
        if allowed is None:
            return ""
        if len(allowed) == 1:
            return next(iter(allowed))
        for known in (self.names, self.configured):
            mine = {n: queue for n, queue in known.items() if n in allowed and n in self.own}
            queues = set(mine.values())
            if self.base in queues:
                return min(name for name, queue in mine.items() if queue == self.base)
            if len(queues) == 1:
                return min(mine)
        return ""

    def listing(self, allowed: Collection[str] | None) -> str:
        """Return what a caller is told of the models that it may ask for: at most so many names."""
        for known in (self.names, self.configured):
            mine = sorted(n for n in visible_names(known) if allowed is None or n in allowed)
            if mine:
                break
        else:
            return "none is served to you now"
        names = ", ".join(name[:_NAME_CHARS] for name in mine[:_NAMES_TOLD])
        return f"served are: {names}{', ...' if len(mine) > _NAMES_TOLD else ''}"

    def is_outdated(self, name: str, allowed: Collection[str] | None) -> bool:
        """Return whether a model is served by workers of an older protocol alone."""
        if self.queue_of(name, allowed) is not None:
            return False
        if not name:
            return any(allowed is None or each in allowed for each in self.outdated)
        mine = allowed is None or name in allowed
        return mine and (name in self.outdated or UNNAMED in self.outdated)

    def _only(self, known: Mapping[str, str]) -> str | None:
        queues = set(known.values())
        if self.base in queues:
            return self.base
        return queues.pop() if len(queues) == 1 else None


def visible_names(names: Iterable[str]) -> list[str]:
    """Return the names to show: of a folder its last part, never where it is."""
    return [name for name in names if not PurePath(name).is_absolute()]


def _is_ours(worker: Mapping[str, Any], base: str) -> bool:
    return bool(worker["queue"] == base or worker["queue"].startswith(f"{base}."))


def _names(worker: Mapping[str, Any], base: str) -> Iterator[str]:
    """Yield the names that a worker answers to."""
    adapters = worker.get("adapters")
    yield from _own_names(worker, base)
    for adapter in adapters if isinstance(adapters, list) else ():
        yield str(adapter)


def _own_names(worker: Mapping[str, Any], base: str) -> Iterator[str]:
    """Yield the names of what it runs for who names nothing."""
    queue, model = worker["queue"], worker.get("model")
    if queue != base:
        yield queue.removeprefix(f"{base}.")
    elif isinstance(model, str) and model:
        yield model
        if PurePath(model).is_absolute():
            yield PurePath(model).name  # a gateway does not show where a folder is
    else:
        yield UNNAMED
