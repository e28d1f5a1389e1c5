"""`producer delete`."""

import click

from contract.errors import BatchConflict
from producer.cli import options, show
from producer.cli.context import Context, pass_context
from producer.cli.progress import tell
from producer.redis import delete_record


@click.command("delete")
@options.batch_id
@click.option("--force", is_flag=True, help="Cancel the batch first, if it is not finished.")
@options.as_json
@pass_context
def command(context: Context, *, batch_id: str, force: bool, as_json: bool) -> None:
    """Delete a finished batch and its results, or a record of `producer serve`.

    \b
    A record is a file (file-...) or a batch that has ended (batch_..., msgbatch_...) of
    a gateway's tenant; `producer records -t TENANT` lists them.
    """
    store = context.store
    if delete_record(store, batch_id) is not None:
        _tell_deleted(batch_id, as_json)
        return
    batch = context.batch(batch_id)
    if force and not batch.finished:
        store.cancel(batch)
    if not store.delete(batch_id, force=force):
        raise BatchConflict(f"batch {batch_id} is still {batch.status}; --force cancels it first")
    _tell_deleted(batch_id, as_json)


def _tell_deleted(batch_id: str, as_json: bool) -> None:
    tell(f"{batch_id}: deleted")
    if as_json:
        show.put_json({"id": batch_id, "object": "warmq.batch", "deleted": True})
