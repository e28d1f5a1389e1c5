"""Finds the models that workers announce or the operator has configured, and their queues.

Each worker writes its announcement, which has its queue, model and state, into Redis once a second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from contract.naming import queue_name
from contract.redis.announced_models import Unloadable, has_loaded, unloadable_of
from contract.redis.announcements import (
    UNNAMED,
    is_alive,
    model_name,
    names_of,
    own_names,
    paths_of,
    protocol_of,
    queues_of,
)
from contract.version import PROTOCOL

#: The name in WARMQ_GATEWAY_MODELS that stands for all names that are not known.
ANY = "*"
#: Most names of models in an error, and most characters of each.
_MOST_NAMES, _NAME_CHARS = 20, 200


def configured_models(text: str) -> dict[str, str]:
    """Return the model of each name in WARMQ_GATEWAY_MODELS ('' for the default queue's).

    `a` is a model with its own queue, `b=a` is another name of it, for example an adapter's,
    `c=` is a model of the default queue, and `*=` makes all unknown names models of that queue.

    Raises:
        ValueError: An entry has no name, or has `*` without an empty model (`*=`).
    """
    models = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, is_other, model = entry.rpartition("=")
        name = name.strip()
        if is_other and not name:
            raise ValueError(
                f"{entry!r} has no name; write NAME, NAME=MODEL or NAME=, separated by commas"
            )
        if ANY in (name, entry) and (model.strip() or not is_other):
            raise ValueError(f"{entry!r}: write {ANY}=, any name of the default queue's model")
        models[name or entry] = model.strip() if is_other else entry
    return models


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models that are served or configured at one moment."""

    base: str
    #: Queue of each name: of names that workers serve, and of names that the operator configured.
    names: Mapping[str, str]
    configured: Mapping[str, str]
    #: Names of models of queues whose workers all have an older protocol, and take no new requests.
    outdated: Collection[str]
    #: Whether a worker is alive that would take new requests.
    alive: bool
    #: Names of the queues' base models, without adapters.
    own: Collection[str] = ()
    #: Whether the default queue takes requests for names that are not known.
    takes_any: bool = False
    #: Queues of models that workers can load, but none has loaded.
    not_loaded: Collection[str] = ()
    #: The queues among these whose model no worker could load at its last try, and the failures.
    unloadable: Mapping[str, Unloadable] = field(default_factory=dict)
    #: Paths of models' folders, which are names that callers may use, but do not see.
    paths: Collection[str] = ()

    @classmethod
    def of(
        cls,
        announced: Iterable[Mapping[str, Any]],
        base: str,
        configured: str,
        *,
        silent: bool = True,
    ) -> ServedModels:
        """Return the models of announced workers of the default queue `base` and its subqueues.

        Without `silent`, workers that have not announced themselves lately serve nothing.
        """
        every = [each for each in announced if _is_ours(each, base)]
        workers = [each for each in every if silent or is_alive(each)]
        current = {each["queue"] for each in workers if protocol_of(each) >= PROTOCOL}
        older = {each["queue"] for each in workers if is_alive(each)} - current
        known = [pair for each in workers for pair in names_of(each, base)]
        models = configured_models(configured)
        takes_any = models.pop(ANY, None) is not None or (not models and _is_one_model(every, base))
        named = {name: queue_name(model, base) for name, model in models.items()}
        return cls(
            base=base,
            names={name: queue for name, queue in known if queue not in older},
            configured={name: queue for name, queue in named.items() if queue not in older},
            outdated={name for name, queue in (*known, *named.items()) if queue in older},
            alive=any(is_alive(each) and protocol_of(each) >= PROTOCOL for each in workers),
            own={
                *(name for each in workers for name in own_names(each, base)),
                *(name for name, model in models.items() if model in ("", name)),
            },
            takes_any=takes_any,
            not_loaded={
                queue
                for each in workers
                for queue in queues_of(each)
                if not any(has_loaded(one, queue) for one in workers)
            },
            unloadable={
                queue: failure
                for queue in {queue for each in workers for queue in queues_of(each)}
                if (failure := unloadable_of(workers, queue))
            },
            paths={path for each in workers for path in paths_of(each)},
        )

    def queue_of(self, name: str, allowed: Collection[str] | None) -> str | None:
        """Return a model's queue; None if the model is neither served nor configured.

        `name` is '' if the caller names no model. `allowed` has the caller's models, None for all.
        """
        if not name:
            if allowed is not None:
                name = self.default_of(allowed)
                return self.queue_of(name, allowed) if name else None
            return self._only(self.names) or self._only(self.configured)
        if allowed is not None and name not in allowed:
            return None
        if queue := self.names.get(name) or self.configured.get(name):
            return queue
        served = self.base in (*self.names.values(), *self.configured.values())
        # A worker that announces no model takes requests for any name.
        takes_any = (self.takes_any and served) or self.names.get(UNNAMED) == self.base
        return self.base if takes_any and name not in self.outdated else None

    def default_of(self, allowed: Collection[str] | None) -> str:
        """Return the model of a caller's requests that name none, or ''.

        It is the caller's only model, or the base model of the default queue or of the only queue.
        The worker gets this name. Without a name it would run its base model, which the key may
        forbid although it allows an adapter. A caller who may use all models (None) needs no name.
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
        """Return an error's text about the models that a caller may use."""
        for known in (self.names, self.configured):
            visible = sorted(n for n in self.visible(known) if allowed is None or n in allowed)
            if visible:
                break
        else:
            return "no model is served to you now"
        names = ", ".join(name[:_NAME_CHARS] for name in visible[:_MOST_NAMES])
        return f"served models: {names}{', ...' if len(visible) > _MOST_NAMES else ''}"

    def visible(self, names: Iterable[str]) -> list[str]:
        """Return the names that callers may see: no paths of folders."""
        shown = (name for name in names if name not in self.paths)
        return [name for name in shown if not PurePath(name).is_absolute()]

    def is_outdated(self, name: str, allowed: Collection[str] | None) -> bool:
        """Return whether only workers of an older protocol serve a model."""
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


def _is_ours(worker: Mapping[str, Any], base: str) -> bool:
    return bool(worker["queue"] == base or worker["queue"].startswith(f"{base}."))


def _is_one_model(workers: Iterable[Mapping[str, Any]], base: str) -> bool:
    """Return whether all workers take the default queue and serve one model, without adapters."""
    combinations = {
        (each["queue"], model_name(each), bool(each.get("adapters"))) for each in workers
    }
    return len(combinations) == 1 and next(iter(combinations))[::2] == (base, False)
