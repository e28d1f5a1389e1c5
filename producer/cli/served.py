"""Says at once that nobody serves the model that requests are sent to."""

from contract.naming import queue_name
from contract.nearest import did_you_mean
from contract.redis.batches import BatchStore
from producer.cli.progress import tell


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
