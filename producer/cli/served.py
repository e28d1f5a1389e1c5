"""Says at once that nobody serves the model that requests are sent to, or none that could."""

from contract.errors import ProtocolMismatch
from contract.naming import queue_name
from contract.nearest import did_you_mean
from contract.redis.batches import BatchStore
from contract.redis.reads import protocol_of
from contract.version import PROTOCOL
from producer.cli.progress import tell


def refuse_older_workers(store: BatchStore, queue: str) -> None:
    """Refuse to queue what no living worker of the queue would find; say so if only some would.

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


def tell_if_unserved(store: BatchStore, base: str, model: str) -> None:
    """Say which models are served if `model` is not, and any other is; '' is the default queue."""
    queue, served = queue_name(model or None, base), store.served_queues()
    if queue in served or not served:
        return
    prefix = f"{base}."
    models = sorted(name.removeprefix(prefix) for name in served if name.startswith(prefix))
    unserved = f"no worker serves queue {queue}"
    options = [f"--model {name}" for name in models]
    if not options and base in served:
        tell(f"{unserved}; a worker serves requests without --model")
        return
    if base in served:
        options.append("and requests without --model")
    if options:
        tell(f"{unserved}; served are: {', '.join(options)}{did_you_mean(model, models)}")
