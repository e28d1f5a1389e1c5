"""Implements `producer results`, which collects a batch's results."""

import click

from contract.errors import BatchConflict
from producer.cli import options, show
from producer.cli.collect import check_outputs, check_replaced, collect
from producer.cli.context import Context, Exit, hint, pass_context

#: Where the results of a run are.
_IN_OUT = (
    "its `producer run` itself writes the results into OUT, and if it has ended early, the same "
    "command goes on"
)


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
@click.option("--follow", is_flag=True, help="Wait for missing results.")
@click.option("--partial", is_flag=True, help="Collect the results so far of an unfinished batch.")
@options.wait_redis
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
    wait_redis: float,
    as_json: bool,
) -> Exit:
    """Collect a batch's results, as OpenAI batch output lines.

    A file appears when it is complete, and replaces only an unchanged earlier
    collection of the batch, unless you give --force. A finished batch gives exactly
    one line for each request; if it is deleted, submitted again or retried meanwhile,
    the exit status is 2 and no file appears. OUT and ERR may be objects in a bucket
    (s3://, gs://, az://). If OUT is a table (.parquet, .csv), it has all rows, with
    their status, and failed requests go into another file only with --errors.

    With --json, the names of the files and the numbers of results are printed on
    stdout, or on stderr if the results themselves go to stdout.
    """
    check_outputs(output, errors, force=force)
    if follow:
        context.wait_for_redis(wait_redis)
    store, batch = context.store, context.no_run(batch_id, _IN_OUT)
    if not force:
        check_replaced(output, errors, batch_id, batch.written)
    if not (batch.finished or follow or partial):
        raise BatchConflict(
            f"batch {batch_id} is still {batch.status}: --follow waits for it, "
            "--partial collects the results so far"
        )
    with hint(f"`producer results {batch_id}` starts again; nothing is lost"):
        completed, failed, errors_file = collect(
            store, batch, order, output, errors, follow=follow, partial=partial, force=force
        )
    show.tell_cut(store.batch(batch_id) or batch)
    if as_json:
        document = {"id": batch_id, "object": "warmq.results"}
        document |= show.written_json(output, errors_file, completed, failed)
        show.put_json(document, err=output in (None, "-"))
    return Exit.SOME_FAILED if failed else Exit.ALL_WELL
