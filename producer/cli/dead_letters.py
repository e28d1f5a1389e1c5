"""What the `producer dead` commands do; every function returns the exit status."""

from __future__ import annotations

import click

from contract import settings as contract_settings
from contract.errors import BatchConflict
from contract.redis.batches import BatchStore
from contract.settings import Settings
from producer.cli.progress import tell
from producer.cli.show import letter_json, letter_list, put_json


def _store() -> BatchStore:
    settings = contract_settings.load(Settings)
    url = settings.redis_url.get_secret_value()
    return BatchStore.open(url, "warmq-producer", ttl_ms=settings.result_ttl_ms)


def list_letters(*, as_json: bool) -> int:
    """Show all dead letters."""
    letters = _store().dead_letters()
    if as_json:
        put_json(letters)
    else:
        letter_list(letters)
    return 0


def show_letter(*, letter_id: str) -> int:
    """Show one dead letter with its message."""
    store = _store()
    for letter in store.dead_letters():
        if letter["id"] == letter_id:
            put_json(letter_json(letter, store.dead_message(letter_id)))
            return 0
    raise _no_letter(letter_id)


def retry(*, letter_ids: tuple[str, ...], every: bool, as_json: bool) -> int:
    """Queue dead letters again."""
    store, wanted = _letters(letter_ids, every)
    return _changed("queued again", store.retry_dead(wanted), as_json)


def delete(*, letter_ids: tuple[str, ...], every: bool, as_json: bool) -> int:
    """Forget dead letters."""
    store, wanted = _letters(letter_ids, every)
    return _changed("deleted", store.delete_dead(wanted), as_json)


def _letters(letter_ids: tuple[str, ...], every: bool) -> tuple[BatchStore, list[str]]:
    """Return the store and the dead letters that a command means."""
    if every == bool(letter_ids):
        raise click.UsageError("name dead letters by their ID, or give --all")
    store = _store()
    known = [letter["id"] for letter in store.dead_letters()]
    unknown = sorted(set(letter_ids) - set(known))
    if unknown:
        raise _no_letter(", ".join(unknown))
    return store, known if every else list(letter_ids)


def _no_letter(letter_id: str) -> BatchConflict:
    return BatchConflict(f"there is no dead letter {letter_id}; see `producer dead list`")


def _changed(what: str, count: int, as_json: bool) -> int:
    tell(f"{count} dead letters {what}")
    if as_json:
        put_json({"requests": count})
    return 0
