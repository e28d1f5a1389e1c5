"""`producer status`."""

import click

from producer.cli import options, show
from producer.cli.context import Context, pass_context
from producer.queue_workers import QueueWorkers
from producer.time_left import batch_seconds_left, pace_of_queue


@click.command("status")
@options.batch_id
@click.option("--request", "custom_id", metavar="CUSTOM_ID", help="Show one request of the batch.")
@options.as_json
@pass_context
def command(context: Context, *, batch_id: str, custom_id: str | None, as_json: bool) -> None:
    """Show how far a batch, or one request of it, is."""
    store, batch = context.store, context.batch(batch_id)
    if custom_id is not None:
        state = show.request_state(store, batch, custom_id)
        show.put_json(state) if as_json else show.request_table(state)
    elif as_json:
        show.put_json(show.batch_json(batch))
    else:
        workers = left_s = None
        if not batch.finished:
            queue = batch.fields.get("queue", "")
            workers = QueueWorkers(store, queue).text()
            left_s = batch_seconds_left(batch, pace_of_queue(store, queue, store.workers(queue)))
        show.batch_table(batch, workers, left_s)
