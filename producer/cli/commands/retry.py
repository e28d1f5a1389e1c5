"""`producer retry`."""

import click

from producer.cli import options
from producer.cli.context import Context, hint, pass_context
from producer.cli.progress import counted, tell
from producer.cli.show import changed


@click.command("retry")
@options.batch_id
@click.option("--include", default="", metavar="LIST", help="Also: cancelled,expired.")
@options.as_json
@pass_context
def command(context: Context, *, batch_id: str, include: str, as_json: bool) -> None:
    """Run a batch's failed requests again. Bad lines stay as they are.

    A deadline that has passed no longer counts for what is retried.
    """
    wanted = [word.strip() for word in include.split(",") if word.strip()]
    if set(wanted) - {"cancelled", "expired"}:
        raise click.UsageError("--include takes cancelled, expired, or both with a comma")
    store, batch = context.store, context.batch(batch_id)
    outcomes = ["failed", *wanted]
    with hint(f"`producer retry {batch_id}` again goes on"):
        count = store.retry(batch, outcomes)
    changed(batch_id, "queued again", count, as_json=as_json)
    if left := store.retryable(batch, outcomes):
        tell(
            f"{batch_id}: {counted(left, 'request')} stay as they ended: their messages are gone, "
            "or they have ended again already; submit what is missing as a new batch"
        )
