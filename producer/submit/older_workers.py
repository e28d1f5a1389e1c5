"""Refuses to queue what workers of an older protocol would not find, or not end."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from contract.errors import ProtocolMismatch
from contract.redis.announcements import protocol_of
from contract.redis.batches import BatchStore
from contract.version import PROTOCOL


def refuse_older_workers(
    store: BatchStore, queue: str, once: bool, tell: Callable[[str], None] = lambda text: None
) -> None:
    """Refuse what no living worker of the queue would find; `tell` it if only some would.

    The list of requests that an engine died with is the one that workers of protocol 1 take ours
    from. They would end such a request alone, and not those with the same body, which wait for it
    in a batch that runs the same bodies `once`: so none of them may be alive then.

    Raises:
        ProtocolMismatch: if all of them are of an older protocol (contract/version.py), or any is
            and the batch runs the same bodies once.
    """
    alive = store.workers(queue)
    older = older_of(alive)
    if not older:
        return
    names = names_of(older)
    if once:
        raise ProtocolMismatch(
            f"nothing was queued: with once, all workers of queue {queue} must speak this "
            f"producer's protocol ({PROTOCOL}), and these are older: {names}; upgrade them, or "
            "leave once out"
        )
    if len(older) < len(alive):
        tell(
            f"some workers of queue {queue} are older than this producer (protocol {PROTOCOL}) and "
            f"do not take what it queues: {names}; upgrade them"
        )
        return
    raise ProtocolMismatch(
        f"nothing was queued: all workers of queue {queue} are older than this producer (protocol "
        f"{PROTOCOL}) and would not take what it queues: {names}; upgrade the workers, or submit "
        "with the version that they run"
    )


def older_of(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the announcements that are of an older protocol than this producer's."""
    return [worker for worker in workers if protocol_of(worker) < PROTOCOL]


def names_of(workers: list[dict[str, Any]]) -> str:
    """Return them with version and protocol, as a message tells them."""
    return ", ".join(
        f"{worker['id']} (warmq {worker.get('version', 'of an unknown version')}, protocol "
        f"{protocol_of(worker)})"
        for worker in workers
    )


def counts_of(workers: list[dict[str, Any]]) -> str:
    """Return how many there are of each version: what anybody may know who sees no machines."""
    found = Counter(
        f"warmq {worker.get('version', 'of an unknown version')} (protocol {protocol_of(worker)})"
        for worker in workers
    )
    return ", ".join(f"{count} of {version}" for version, count in sorted(found.items()))
