"""`producer watch`."""

import sys
import time
from collections.abc import Callable

import click

from contract.batch import Batch
from contract.errors import BatchConflict
from contract.index import leader_of
from contract.redis.batches import BatchStore
from contract.results import outcome_of, read_meta
from contract.streaming import LISTEN_S, Entry, Transcript, texts_of
from producer.cli import options, progress, show
from producer.cli.context import WATCH_AGAIN, Context, Exit, hint, pass_context
from producer.cli.progress import tell
from producer.queue_workers import QueueWorkers
from producer.same_batch import SameBatch

#: How long to wait for text before looking whether there is a result.
LOOK_S = 1.0
#: How often to say what the workers do while no text comes, in seconds.
TELL_S = 30.0


@click.command("watch")
@options.batch_id
@click.option("--request", "custom_id", metavar="CUSTOM_ID", help="With --stream: this request.")
@click.option("--stream", is_flag=True, help="Print the request's text while it is written.")
@options.as_json
@pass_context
def command(
    context: Context, *, batch_id: str, custom_id: str | None, stream: bool, as_json: bool
) -> Exit:
    """Follow a batch to its end: done and failed, rate, tokens/s, time left.

    With --request and --stream: print the text of one request as the model writes
    it, of its first choice; with --json every entry of its stream, all choices.
    """
    if stream != (custom_id is not None):
        raise click.UsageError("--stream and --request go together: a text is one request's")
    store, batch = context.store, context.batch(batch_id)
    if custom_id is not None:
        outcome = listen(store, batch, custom_id, show.put_json if as_json else None)
        return Exit.ALL_WELL if outcome == "completed" else Exit.SOME_FAILED
    with hint(WATCH_AGAIN.format(batch_id)):
        batch = progress.watch(store, batch)
    if as_json:
        show.put_json(show.batch_json(batch))
    return show.ended(batch)


def listen(
    store: BatchStore, batch: Batch, custom_id: str, show: Callable[[Entry], None] | None = None
) -> str:
    """Print the text of one request until it has its result; return its outcome.

    With `show`, nothing is printed, and it gets every entry of the request's stream.

    Raises:
        BatchConflict: if there is no such request, or its result is gone.
        BatchChanged: if the batch is deleted or submitted anew meanwhile.
    """
    found, own_id = store.find(batch, custom_id)
    request_id = leader_of(found) or own_id
    same = SameBatch(store, batch, "a request of it was watched", may_reopen=True)
    listener, transcript = store.listener(request_id), Transcript()
    workers = QueueWorkers(store, batch.fields.get("queue", ""))
    announce_at = tell_at = 0.0
    while True:
        if time.monotonic() >= announce_at:
            listener.announce()
            announce_at = time.monotonic() + LISTEN_S / 3
        # First the result: what was written before it is then in the entries read after it.
        raw = store.results([request_id])[0]
        whole = raw is not None and bool(transcript.ended or not transcript.attempt)
        entries = list(listener.read(0 if whole else LOOK_S))
        for entry in entries:
            _take(transcript, entry, show)
        if raw is not None and not entries:
            break
        if raw is None and not entries:
            _still_there(store, same, request_id)
        now = time.monotonic()
        if not entries and now >= tell_at:
            tell(f"{custom_id} waits; {workers.text()}")
        if entries or now >= tell_at:
            tell_at = now + TELL_S
    meta = read_meta(raw)
    outcome = outcome_of(meta)
    if show is None:
        _finish(transcript, texts_of(meta["result"]).get(0, "") if outcome == "completed" else "")
    return outcome


def _still_there(store: BatchStore, same: SameBatch, request_id: str) -> None:
    """Raise where no result will come any more."""
    batch = same.state()
    if not batch.finished or store.results([request_id]) != [None]:
        return
    if same.state().number("retried") == batch.number("retried"):  # else it is there anew
        raise BatchConflict(f"batch {batch.id} has ended, and this result is gone: it expired")


def _take(transcript: Transcript, entry: Entry, show: Callable[[Entry], None] | None) -> None:
    had = transcript.texts.get(0, "")
    new = transcript.add(entry)
    if show is not None:
        show(entry)
    elif entry["event"] == "begin" and had and not transcript.texts:
        _write("\n")
        tell(f"attempt {transcript.attempt}: the text begins anew")
    else:
        _write(new)


def _finish(transcript: Transcript, text: str) -> None:
    """Print what of the result's text has not been printed."""
    had = transcript.texts.get(0, "")
    if text.startswith(had):
        _write(text[len(had) :] + "\n")
    else:
        _write("\n")
        tell("the result's text is another than what was written meanwhile:")
        _write(text + "\n")


def _write(text: str) -> None:
    if sys.stdout.isatty():  # a model may write what moves the cursor, or worse
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()
