"""Implements `producer dead`, which lists, shows, retries and deletes dead letters."""

from collections.abc import Sequence

import click

from contract.errors import BatchConflict
from contract.redis.batches import BatchStore
from producer.cli import options
from producer.cli.context import Context, pass_context
from producer.cli.progress import counted, tell
from producer.cli.show import print_columns, put_json, put_json_list
from producer.input.tables.kept import listed
from producer.over_http import retry_letters

#: Rows of the list that are printed together, with aligned columns.
_ALIGNED_ROWS = 500
_letter_ids = click.argument("letter_ids", metavar="ID...", nargs=-1)
_every = click.option("--all", "every", is_flag=True, help="Take all dead letters.")


@click.group("dead")
def command() -> None:
    """Inspect dead letters: messages that are unreadable, or that killed the engine."""


@command.command("list")
@options.as_json
@pass_context
def list_letters(context: Context, *, as_json: bool) -> None:
    """List the dead letters, oldest first, without their content."""
    letters = context.store.dead_letters()
    if as_json:
        put_json_list(letters)
        return
    rows = [("ID", "BATCH", "CUSTOM_ID", "REASON")]
    for letter in letters:
        custom_id = letter["custom_id"] or "-"
        rows.append((letter["id"], letter["batch_id"] or "-", custom_id, letter["reason"]))
        if len(rows) > _ALIGNED_ROWS:
            print_columns(rows)
            rows.clear()
    print_columns(rows)


@command.command("show")
@click.argument("letter_id", metavar="ID")
@pass_context
def show_letter(context: Context, *, letter_id: str) -> None:
    """Print one dead letter with its message, as JSON."""
    for letter in context.store.dead_letters([letter_id]):
        message = context.store.dead_message(letter_id).decode(errors="replace")
        put_json({**letter, "message": message})
        return
    raise _no_letter(letter_id)


@command.command("retry")
@_letter_ids
@_every
@options.as_json
@pass_context
def retry(context: Context, *, letter_ids: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Queue dead letters again. Unreadable ones stay."""
    store, ids = _store_and_ids(context, letter_ids, every)
    count, left = retry_letters(store, ids)
    if left:
        text = (
            f"not queued, because the batch was made over HTTP and has ended: {listed(left)}; run "
            "the lines as a new batch, then delete the dead letters"
        )
        if not (count or every):
            raise BatchConflict(text)
        tell(text)
    _print_changed("queued again", count, as_json)


@command.command("delete")
@_letter_ids
@_every
@options.as_json
@pass_context
def delete(context: Context, *, letter_ids: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Delete dead letters with their messages. Results stay."""
    store, ids = _store_and_ids(context, letter_ids, every)
    _print_changed("deleted", store.delete_dead(ids), as_json)


def _store_and_ids(
    context: Context, letter_ids: tuple[str, ...], every: bool
) -> tuple[BatchStore, Sequence[str] | None]:
    """Return the store and the ids of the dead letters that are named; None means all."""
    if every == bool(letter_ids):
        raise click.UsageError("name dead letters by their ID, or give --all")
    store = context.store
    if every:
        return store, None
    if unknown := sorted(
        set(letter_ids) - {letter["id"] for letter in store.dead_letters(letter_ids)}
    ):
        raise _no_letter(", ".join(unknown))
    return store, letter_ids


def _no_letter(letter_id: str) -> BatchConflict:
    return BatchConflict(f"there is no dead letter {letter_id}; see `producer dead list`")


def _print_changed(what: str, count: int, as_json: bool) -> None:
    tell(f"{counted(count, 'dead letter')} {what}")
    if as_json:
        put_json({"requests": count})
