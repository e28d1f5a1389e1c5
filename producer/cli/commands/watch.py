"""Implements `producer watch`, which follows a batch, or streams a request's text."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing

import click

from contract.batch import Batch
from contract.errors import BatchConflict
from contract.index import leader_of
from contract.redis.batches import BatchStore
from contract.results import outcome_of, read_meta
from contract.streaming import Piece, Transcript, texts_of
from producer.batch_watch import BatchWatch
from producer.cli import options, progress, show
from producer.cli.context import WATCH_AGAIN, Context, Exit, hint, pass_context
from producer.cli.progress import tell
from producer.queue_workers import BatchWorkers

Entry = dict[str, str]

#: Seconds to wait for text before the next check for the result.
POLL_S = 1.0
#: Seconds without text after which a line about the workers is printed again.
TELL_EVERY_S = 30.0


@click.command("watch")
@options.batch_id
@click.option(
    "--request", "custom_id", metavar="CUSTOM_ID", help="Request whose text --stream prints."
)
@click.option("--stream", is_flag=True, help="Print the request's text while it is written.")
@options.wait_redis
@options.as_json
@pass_context
def command(
    context: Context,
    *,
    batch_id: str,
    custom_id: str | None,
    stream: bool,
    wait_redis: float,
    as_json: bool,
) -> Exit:
    """Follow a batch or run to its end: counts, rates (last 30 s), time left.

    With --request and --stream, print one request's text while the model writes it:
    the text of its first choice or, with --json, all choices, with a JSON line for
    each piece.
    """
    if stream != (custom_id is not None):
        raise click.UsageError("give both --stream and --request, or neither")
    context.wait_for_redis(wait_redis)
    store, batch = context.store, context.batch(batch_id)
    if custom_id is not None:
        batch = context.batch_of(batch_id, custom_id)
        outcome = stream_text(store, batch, custom_id, show.put_json if as_json else None)
        return Exit.ALL_WELL if outcome == "completed" else Exit.SOME_FAILED
    with hint(WATCH_AGAIN.format(batch_id)):
        batch = progress.watch(store, batch)
    if as_json:
        show.put_json(show.batch_json(batch))
    status = show.print_end(batch)
    show.tell_cut(batch)
    return status


def stream_text(
    store: BatchStore, batch: Batch, custom_id: str, put: Callable[[Entry], None] | None = None
) -> str:
    """Print a request's text until the request has its result; return its outcome.

    If `put` is given, it gets JSON entries instead: `begin` for each attempt, `text` for each piece
    of each choice, and `end`.
    """
    entry, own_id = store.find(batch, custom_id)
    request_id = leader_of(entry) or own_id
    changes = BatchWatch(store, batch, "a request of it was watched", may_reopen=True)
    workers = BatchWorkers(store)
    output = TextPrinter() if put is None else EntryWriter(put)
    tell_at = 0.0
    with closing(store.listener(request_id)) as listener:
        transcript = listener.transcripts[request_id]
        while (raw := store.results([request_id])[0]) is None:
            pieces = listener.read(POLL_S)
            for piece in pieces:
                output.add(piece)
            if not pieces:
                _check_not_expired(store, changes, request_id)
            now = time.monotonic()
            if not pieces and now >= tell_at:
                tell(f"{custom_id} waits; {workers.text(batch)}")
            if pieces or now >= tell_at:
                tell_at = now + TELL_EVERY_S
    meta = read_meta(raw)
    outcome = outcome_of(meta)
    output.end(transcript, outcome, texts_of(meta.get("result")) if outcome == "completed" else {})
    return outcome


def _check_not_expired(store: BatchStore, changes: BatchWatch, request_id: str) -> None:
    """Raise BatchConflict if the batch has ended and the result has expired."""
    batch = changes.state()
    if not batch.finished or store.results([request_id]) != [None]:
        return
    # If the batch was retried in between, the request runs again.
    if changes.state().number("retried") == batch.number("retried"):
        raise BatchConflict(f"batch {batch.id} has ended, and this result is gone: it expired")


class TextPrinter:
    """Prints the text of the first choice."""

    def __init__(self) -> None:
        self._written = ""

    def add(self, piece: Piece) -> None:
        """Print a piece; a new attempt begins on a new line."""
        if piece.choice:
            return
        if self._written and not piece.at:
            _write("\n")
            tell(f"attempt {piece.attempt}: the text begins again")
            self._written = ""
        self._written += piece.text
        _write(piece.text)

    def end(self, transcript: Transcript, outcome: str, texts: Mapping[int, str]) -> None:
        """Print the rest of the result's text."""
        text = texts.get(0, "")
        if text.startswith(self._written):
            _write(text[len(self._written) :] + "\n")
        else:
            _write("\n")
            tell("the text of the result differs from the text above; it is:")
            _write(text + "\n")


class EntryWriter:
    """Passes on all choices as entries; those since the last `begin` have the whole text."""

    def __init__(self, put: Callable[[Entry], None]) -> None:
        self._put = put
        self._attempt = 0
        #: Choice -> its text since the last `begin`.
        self._texts: dict[int, str] = {}

    def add(self, piece: Piece) -> None:
        """Pass a piece on."""
        if piece.attempt != self._attempt:
            self._begin(piece.attempt)
        elif piece.choice in self._texts and not piece.at:  # only this choice's text begins again
            texts = self._texts
            self._begin(piece.attempt)
            for choice, text in texts.items():
                if choice != piece.choice:
                    self._put_text(piece._replace(choice=choice, text=text))
        self._put_text(piece)

    def _begin(self, attempt: int) -> None:
        self._attempt, self._texts = attempt, {}
        self._put({"event": "begin", "attempt": str(attempt)})

    def _put_text(self, piece: Piece) -> None:
        self._texts[piece.choice] = self._texts.get(piece.choice, "") + piece.text
        self._put({
            "event": "text", "attempt": str(piece.attempt), "choice": str(piece.choice),
            "at": str(piece.at), "text": piece.text,
        })  # fmt: skip

    def end(self, transcript: Transcript, outcome: str, texts: Mapping[int, str]) -> None:
        """Pass on the rest of the result's texts, and an `end` entry."""
        passed_on, attempt = dict(transcript.texts), max(1, transcript.attempt)
        whole = bool(texts) and all(texts.get(n, "").startswith(t) for n, t in passed_on.items())
        for choice, text in texts.items() if whole else ():
            at = len(passed_on.get(choice, ""))
            if piece := transcript.add(Piece("", attempt, choice, at, text[at:])):
                self.add(piece)
        self._put({"event": "end", "attempt": str(attempt), "outcome": outcome,
                   "whole": str(int(whole))})  # fmt: skip


def _write(text: str) -> None:
    if sys.stdout.isatty():  # a model may write control characters
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()
