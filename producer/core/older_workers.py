"""Refuses to queue what no worker of a queue would find, because all are of an older protocol."""

from collections.abc import Callable

from contract.errors import ProtocolMismatch
from contract.redis.batches import BatchStore
from contract.redis.reads import protocol_of
from contract.version import PROTOCOL


def refuse_older_workers(
    store: BatchStore, queue: str, tell: Callable[[str], None] = lambda text: None
) -> None:
    """Refuse what no living worker of the queue would find; `tell` it if only some would.

    Raises:
        ProtocolMismatch: if all of them are of an older protocol (contract/version.py).
    """
    alive = store.workers(queue)
    older = [worker for worker in alive if protocol_of(worker) < PROTOCOL]
    if not older:
        return
    names = ", ".join(
        f"{worker['id']} (warmq {worker.get('version', 'of an unknown version')}, protocol "
        f"{protocol_of(worker)})"
        for worker in older
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
