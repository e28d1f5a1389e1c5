"""`producer list`, `status`, `cancel`, `retry` and `delete`."""

import click

from contract.errors import BatchConflict
from producer.cli import options, show
from producer.cli.context import Context, hint, pass_context
from producer.cli.progress import counted, tell
from producer.queue_workers import QueueWorkers
from producer.redis import delete_record
from producer.time_left import batch_seconds_left, pace_of_queue

_request = click.option("--request", "custom_id", metavar="CUSTOM_ID", help="Only this request.")


@click.command("list")
@options.as_json
@pass_context
def list_batches(context: Context, *, as_json: bool) -> None:
    """List all batches, newest first."""
    batches = context.store.batches()
    if as_json:
        show.put_json([show.batch_json(batch) for batch in batches])
        return
    rows = [("BATCH", "STATUS", "DONE", "FAILED", "CREATED")]
    for batch in batches:
        done = f"{batch.terminal}/{batch.number('total')}"
        created = str(show.iso_time(batch.created))[:19]
        rows.append((batch.id, batch.status, done, str(batch.number("failed")), created))
    show.columns(rows)


@click.command("status")
@options.batch_id
@_request
@options.as_json
@pass_context
def status(context: Context, *, batch_id: str, custom_id: str | None, as_json: bool) -> None:
    """Show the progress of a batch, or of one request of it."""
    store, batch = context.store, context.batch(batch_id)
    if custom_id is not None:
        state = show.request_state(store, batch, custom_id)
        show.put_json(state) if as_json else show.request_table(state)
    elif as_json:
        show.put_json(show.batch_json(batch))
    elif batch.finished:
        show.batch_table(batch)
    else:
        queue = batch.fields.get("queue", "")
        left_s = batch_seconds_left(batch, pace_of_queue(store, queue, store.workers(queue)))
        show.batch_table(batch, QueueWorkers(store, queue).text(), left_s)


@click.command("cancel")
@options.batch_id
@_request
@options.as_json
@pass_context
def cancel(context: Context, *, batch_id: str, custom_id: str | None, as_json: bool) -> None:
    """Cancel a batch's queued and running requests."""
    store, batch, what = context.store, context.batch(batch_id), "cancelled"
    if custom_id is not None:
        count = store.cancel_request(batch, custom_id)
    else:
        with hint(f"`producer cancel {batch_id}` again completes it"):
            in_flight = store.in_flight(batch)
            count = store.cancel(batch)
        if count:
            in_flight = min(in_flight, count)  # some may have ended before they were cancelled
            what += f" ({count - in_flight} queued, {in_flight} in flight)"
    _print_changed(batch_id, what, count, as_json)


@click.command("retry")
@options.batch_id
@click.option(
    "--include",
    default="",
    metavar="LIST",
    help="Retry requests with these outcomes too: cancelled,expired.",
)
@options.as_json
@pass_context
def retry(context: Context, *, batch_id: str, include: str, as_json: bool) -> None:
    """Run a batch's failed requests again. Bad lines stay as they are.

    A deadline that has passed no longer applies to retried requests.
    """
    wanted = [word.strip() for word in include.split(",") if word.strip()]
    if set(wanted) - {"cancelled", "expired"}:
        raise click.UsageError("--include takes cancelled, expired, or both with a comma")
    store, batch = context.store, context.batch(batch_id)
    outcomes = ["failed", *wanted]
    with hint(f"`producer retry {batch_id}` again goes on"):
        count = store.retry(batch, outcomes)
    _print_changed(batch_id, "queued again", count, as_json)
    if left := store.retryable(batch, outcomes):
        tell(
            f"{batch_id}: {counted(left, 'request')} stay as they ended: their messages are gone, "
            "or they have ended again already; submit what is missing as a new batch"
        )


def _print_changed(batch_id: str, what: str, count: int, as_json: bool) -> None:
    tell(f"{batch_id}: {counted(count, 'request')} {what}")
    if as_json:
        show.put_json({"id": batch_id, "requests": count})


@click.command("delete")
@options.batch_id
@click.option("--force", is_flag=True, help="Cancel the batch first, if it is not finished.")
@options.as_json
@pass_context
def delete(context: Context, *, batch_id: str, force: bool, as_json: bool) -> None:
    """Delete a finished batch and its results, or a record of `producer serve`.

    \b
    A record is a file (file-...) or a batch that has ended (batch_..., msgbatch_...) of
    a gateway's tenant; `producer records -t TENANT` lists them.
    """
    store = context.store
    if delete_record(store, batch_id) is None:
        batch = context.batch(batch_id)
        if force and not batch.finished:
            store.cancel(batch)
        if not store.delete(batch_id, force=force):
            raise BatchConflict(
                f"batch {batch_id} is still {batch.status}; --force cancels it first"
            )
    tell(f"{batch_id}: deleted")
    if as_json:
        show.put_json({"id": batch_id, "object": "warmq.batch", "deleted": True})


COMMANDS = {command.name: command for command in (list_batches, status, cancel, retry, delete)}
