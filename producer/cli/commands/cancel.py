"""`producer cancel`."""

import click

from producer.cli import options
from producer.cli.context import Context, hint, pass_context
from producer.cli.show import changed


@click.command("cancel")
@options.batch_id
@click.option("--request", "custom_id", metavar="CUSTOM_ID", help="Cancel only this request.")
@options.as_json
@pass_context
def command(context: Context, *, batch_id: str, custom_id: str | None, as_json: bool) -> None:
    """Cancel what is not finished, queued or running."""
    store, batch = context.store, context.batch(batch_id)
    if custom_id is not None:
        what, count = "cancelled", store.cancel_request(batch, custom_id)
    else:
        with hint(f"`producer cancel {batch_id}` again ends it"):
            in_flight = store.in_flight(batch)
            count = store.cancel(batch)
        in_flight = min(in_flight, count)  # some may have ended before they were cancelled
        what = (
            f"cancelled ({count - in_flight} queued, {in_flight} in flight)"
            if count
            else "cancelled"
        )
    changed(batch_id, what, count, as_json=as_json)
