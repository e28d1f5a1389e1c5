"""`producer results`."""

import click

from contract.errors import BatchConflict
from producer.cli import options
from producer.cli.collect import check_outputs, collect
from producer.cli.context import Context, Exit, hint, pass_context


@click.command("results")
@options.batch_id
@options.output
@options.errors
@click.option(
    "--order",
    type=click.Choice(["input", "completion"]),
    default="input",
    show_default=True,
    help="Order of the lines.",
)
@click.option("--follow", is_flag=True, help="Wait for the results that are not there yet.")
@click.option("--partial", is_flag=True, help="Of an unfinished batch, take what is there.")
@pass_context
def command(
    context: Context,
    *,
    batch_id: str,
    output: str | None,
    errors: str | None,
    order: str,
    follow: bool,
    partial: bool,
) -> Exit:
    """Collect a batch's results, as OpenAI batch output lines.

    A file appears when it is complete, never half-written. A finished batch
    gives exactly one line for each request; if it is deleted, submitted anew or
    retried meanwhile, this ends with 2 and says so, and no file appears.
    """
    check_outputs(output, errors)
    store, batch = context.store, context.batch(batch_id)
    if not (batch.finished or follow or partial):
        raise BatchConflict(
            f"batch {batch_id} is still {batch.status}: --follow waits for it, "
            "--partial takes what is there"
        )
    with hint(f"`producer results {batch_id}` starts again; nothing is lost"):
        collected = collect(store, batch, order, output, errors, follow=follow, partial=partial)
    return Exit.SOME_FAILED if collected.failed else Exit.ALL_WELL
