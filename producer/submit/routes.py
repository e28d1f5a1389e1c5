"""Finds the queue of each line of a file by the model that the line names.

The routes of a batch are in Redis, so that every submit of its file finds the same queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from contract.batch import Batch
from contract.errors import bad_field
from contract.message import MessageWriter
from contract.naming import did_you_mean, queue_name
from contract.openai.decode import printable
from contract.openai.lines import Request
from contract.redis.announcements import (
    is_alive,
    model_name,
    names_of,
    paths_of,
    protocol_of,
    queues_of,
)
from contract.redis.batches import BatchStore
from contract.version import PROTOCOL
from producer.submit.submission import Submission

#: Most models that an error names.
_MOST_NAMES = 20


@dataclass(frozen=True, slots=True)
class Routes:
    """The queue of each model with a queue of its own, and of all other models under the name ''.

    Without the name '', other models have no queue. `base` is the queue of lines that name no
    model, `writers` write the messages for each queue.
    """

    queues: Mapping[str, str]
    base: str
    writers: Mapping[str, MessageWriter] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch, submission: Submission) -> Routes:
        """Return the routes that a batch has."""
        queues, base = batch.routes, submission.queue
        writers = {name: submission.writer(batch, name) for name in {base, *queues.values()}}
        return cls(queues, base, writers)

    def queue_of(self, request: Request) -> str:
        """Return the queue of a request that `check` accepts."""
        return self.queues.get(request.model, self.base)

    def check(self, request: Request) -> None:
        """Raise RequestRejected for a model that no worker serves."""
        name, known = request.model, self.queues
        if not name or name in known or "" in known:
            return
        names = sorted(known)
        more = ", ..." if len(names) > _MOST_NAMES else ""
        raise bad_field(
            "model",
            f"no worker serves {printable(name, 200)!r}; workers serve: "
            f"{', '.join(names[:_MOST_NAMES])}{more}{did_you_mean(name, names)}",
            code="model_not_found",
        )


#: The routes of a batch whose lines all go to one queue.
NO_ROUTES = Routes({}, "")


def routed(submission: Submission, store: BatchStore, base: str) -> Submission:
    """Return the submission with the current routes, unless it has a model for all lines."""
    if submission.model or "model" in submission.overrides:
        return submission
    return replace(submission, routes=find_routes(store.announcements(), base))


def to_default_queue(submission: Submission, store: BatchStore, base: str) -> Submission:
    """Return the submission for the default queue, `base`, if its model is served only there.

    Workers that are gone count, too, so that an interrupted submit finds the same queue again.
    """
    queue, name = submission.queue, submission.model
    if not name or queue == base:
        return submission
    if (batch := store.batch(submission.batch_id)) is not None:
        there = batch.fields.get("model") == name and batch.fields.get("queue") == base
        return replace(submission, queue=base) if there else submission
    announced = store.announcements()
    if any(queue in queues_of(worker) for worker in announced):
        return submission
    ours = [worker for worker in announced if worker["queue"] == base]
    served = any(name in (model_name(one), *paths_of(one)) for one in ours)
    return replace(submission, queue=base) if served else submission


def find_routes(announced: Iterable[Mapping[str, Any]], base: str) -> dict[str, str]:
    """Return the routes to announced workers; none if no model has a queue of its own.

    `base` is the default queue. A model that workers of the default queue also serve has no route.
    """
    workers = [each for each in announced if protocol_of(each) >= PROTOCOL]
    of_base = [each for each in workers if f"{each['queue']}.".startswith(f"{base}.")]
    found: dict[str, str] = {}
    for name, queue in (pair for each in of_base for pair in names_of(each, base)):
        # The default queue is preferred, then the queue of the model with this name, then that of a
        # model with an adapter of this name.
        if found.get(name) not in (base, queue_name(name, base)) or queue == base:
            found[name] = queue
    routes = {name: queue for name, queue in found.items() if queue != base}
    if routes and (base in found.values() or not any(map(is_alive, workers))):
        routes[""] = base
    return routes
