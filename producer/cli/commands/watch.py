"""`producer watch`."""

from __future__ import annotations

import click

from producer.cli import options, progress, show
from producer.cli.context import (
    ALL_WELL,
    SOME_FAILED,
    WATCH_AGAIN,
    Context,
    hint,
    pass_context,
)  # fmt: skip
from producer.cli.listen import listen


@click.command("watch")
@options.batch_id
@click.option("--request", "custom_id", metavar="CUSTOM_ID", help="With --stream: this request.")
@click.option("--stream", is_flag=True, help="Print the request's text while it is written.")
@options.as_json
@pass_context
def command(
    context: Context, *, batch_id: str, custom_id: str | None, stream: bool, as_json: bool
) -> int:
    """Follow a batch to its end: done and failed, rate, tokens/s, time left.

    With --request and --stream: print the text of one request as the model writes
    it, of its first choice; with --json every entry of its stream, all choices.
    """
    if stream != (custom_id is not None):
        raise click.UsageError("--stream and --request go together: a text is one request's")
    store, batch = context.store, context.batch(batch_id)
    if custom_id is not None:
        outcome = listen(store, batch, custom_id, show.put_json if as_json else None)
        return ALL_WELL if outcome == "completed" else SOME_FAILED
    with hint(WATCH_AGAIN.format(batch_id)):
        batch = progress.watch(store, batch)
    if as_json:
        show.put_json(show.batch_json(batch))
    return show.ended(batch)
