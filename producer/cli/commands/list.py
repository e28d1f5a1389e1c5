"""`producer list`."""

import click

from producer.cli import options, show
from producer.cli.context import Context, pass_context


@click.command("list")
@options.as_json
@pass_context
def command(context: Context, *, as_json: bool) -> None:
    """List all batches, newest first."""
    batches = context.store.batches()
    if as_json:
        show.put_json([show.batch_json(batch) for batch in batches])
    else:
        show.batch_list(batches)
