"""`producer results`."""

import click

from contract.errors import BatchConflict
from producer.cli import options
from producer.cli.collect import check_outputs, check_replaced, collect
from producer.cli.context import Context, Exit, hint, pass_context
from producer.cli.show import put_json, written_json


@click.command("results")
@options.batch_id
@options.output
@options.errors
@options.force
@click.option(
    "--order",
    type=click.Choice(["input", "completion"]),
    default="input",
    show_default=True,
    help="Order of the lines.",
)
@click.option("--follow", is_flag=True, help="Wait for the results that are not there yet.")
@click.option("--partial", is_flag=True, help="Of an unfinished batch, take what is there.")
@options.as_json
@pass_context
def command(
    context: Context,
    *,
    batch_id: str,
    output: str | None,
    errors: str | None,
    force: bool,
    order: str,
    follow: bool,
    partial: bool,
    as_json: bool,
) -> Exit:
    """Collect a batch's results, as OpenAI batch output lines.

    A file appears when it is complete, never half-written, and replaces only an
    earlier collection of the batch that nobody has changed since, unless you give
    --force. A finished batch gives exactly one line for each request; if it is
    deleted, submitted anew or retried meanwhile, this ends with 2 and says so, and
    no file appears. OUT and ERR may be objects in a bucket (s3://, gs://, az://),
    and tables (.parquet).

    With --json: where the results are and how many, on stdout, or on stderr if
    the results themselves go to stdout.
    """
    check_outputs(output, errors, forced=force)
    store, batch = context.store, context.batch(batch_id)
    if not force:
        check_replaced(output, errors, batch_id, batch.written)
    if not (batch.finished or follow or partial):
        raise BatchConflict(
            f"batch {batch_id} is still {batch.status}: --follow waits for it, "
            "--partial takes what is there"
        )
    with hint(f"`producer results {batch_id}` starts again; nothing is lost"):
        collected = collect(
            store, batch, order, output, errors, follow=follow, partial=partial, forced=force
        )
    if as_json:
        done = written_json(output, collected.errors_file, collected.completed, collected.failed)
        document = {"id": batch_id, "object": "warmq.results"} | done
        put_json(document, err=output in (None, "-"))
    return Exit.SOME_FAILED if collected.failed else Exit.ALL_WELL
